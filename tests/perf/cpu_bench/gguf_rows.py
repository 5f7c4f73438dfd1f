"""mvllm beside llama.cpp on the same GGUF files: `bench cpu --gguf [FILE | NAME ...]`.

A name is one of the models that the benchmark makes with llama.cpp's quantizer, such as `S-q4_k_m` (`made` stands for
all of them), or `smollm2` or `gemma`, the files that `ci/dev.py test --published` fetches (`published` for both). The
default is all of them. Both engines are loaded, then run in turn: mvllm, llama.cpp, mvllm, ... The workloads are those
of `workloads.py`, with prompts as long as the file's context allows, and

    start   from a new process to the first token of 32: with Python and its imports, and without them

In `start` mvllm also loads the tokenizer, as llama.cpp always does, and the file was read before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.published import FILES, MISSING, find_published
from tests.perf.cpu_bench.engine_process import EngineFailed, EngineProcess
from tests.perf.cpu_bench.engines import RUNNERS, Engine
from tests.perf.cpu_bench.limits import BF16
from tests.perf.cpu_bench.machine import Probe, wait_until_idle
from tests.perf.cpu_bench.models import MAX_POSITIONS, gguf_model
from tests.perf.cpu_bench.table import Record
from tests.perf.cpu_bench.workloads import START, WARM_UP, WORKLOADS, Workload, prompts_of

MADE = tuple(f"{model}-{quantization}" for model in "SMH" for quantization in ("q4_0", "q4_k_m", "q8_0"))
GGUF_WORKLOADS = ("single", "prefill", "offline", START)
OURS, PEER = "mvllm", "llama.cpp"
KV_BYTES = 2 << 30  # the offline batch of M takes 1.2e9
LOADED = "start, without imports"


@dataclass(frozen=True)
class File:
    """A GGUF file.

    Attributes:
        name: In the table.
        vocab_size: Number of token ids.
        context: Longest sequence that the file permits, at most that of the benchmark.
    """

    name: str
    path: Path
    vocab_size: int
    context: int

    @classmethod
    def of(cls, path: Path) -> File:
        """Reads the sizes from the file's header.

        Raises:
            ModelError: It is not a GGUF file, or it is damaged.
        """
        from mvllm_gguf.header import read_gguf

        header = read_gguf(path)
        values = header.metadata
        context = int(values.get(f"{values.get('general.architecture')}.context_length", MAX_POSITIONS))
        # The dimensions may be in either order.
        vocab_size = max(header.tensors["token_embd.weight"].shape)
        tokens = values.get("tokenizer.ggml.tokens")
        return cls(path.stem, path, len(tokens) if tokens else vocab_size, min(context, MAX_POSITIONS))

    def fitted(self, workload: Workload) -> Workload:
        """`workload` with prompts that fit into the context together with the output."""
        own = min(workload.own, self.context - workload.shared - workload.output)
        return dataclasses.replace(workload, own=own)


NAMES = {"made": MADE, "published": tuple(FILES)}
"""Names that stand for several."""


def files_of(asked: Sequence[str], models: Path, peer: Engine | None) -> list[File]:
    """The asked files, made if they are the benchmark's own and missing; of `NAMES` if none is asked.

    Raises:
        ValueError: A name is neither a file nor known, or its file is missing and cannot be made.
        subprocess.CalledProcessError: A file could not be made; the output is attached.
    """
    single = [each for name in asked or NAMES for each in NAMES.get(name, (name,))]
    return [File.of(_path_of(name, models, peer)) for name in single]


def _path_of(name: str, models: Path, peer: Engine | None) -> Path:
    if Path(name).is_file():
        return Path(name)
    if name in FILES:
        if (published := find_published(name)) is None:
            raise ValueError(f"--gguf got {name!r}: {MISSING}.")
        return published
    if name not in MADE:
        known = ", ".join((*NAMES, *MADE, *FILES))
        raise ValueError(f"--gguf got {name!r}, which is no file. Pass a GGUF file or one of {known}.")
    path = models / "gguf" / f"{name}.gguf"
    if path.exists():
        return path
    if peer is None:
        raise ValueError(f"{path} is missing, and llama.cpp makes it. Pass its environment with --peers.")
    model, quantization = name.split("-")
    return gguf_model(models, model, quantization, peer.python)


def our_engine(dtype: str, *, with_tokenizer: bool = False) -> Engine:
    """mvllm on a GGUF file."""
    options = (f'dtype="{dtype}"', f"skip_tokenizer_init={'false' if with_tokenizer else 'true'}")
    return Engine(OURS, "gguf", RUNNERS / "run_mvllm.py", Path(sys.executable), "gguf", BF16, True, options)


class FileBenchmark:
    """Runs mvllm and llama.cpp in turn on GGUF files.

    Args:
        peer: llama.cpp, or None to measure mvllm alone.
        dtype: Compute dtype of mvllm.
        probe: Measures the machine's rates.
        threads: Threads of each engine.
        logs: Folder for the engines' output.
        keep: Called with each new record; its precision is the file's name.
        seed: Seed of the prompts.
        idle_limit: Seconds to wait for an idle machine before each run.
    """

    def __init__(
        self,
        peer: Engine | None,
        *,
        dtype: str,
        probe: Probe,
        threads: int,
        logs: Path,
        keep: Callable[[Record], None],
        seed: int,
        idle_limit: float,
    ) -> None:
        self._peer = dataclasses.replace(peer, name=PEER, precision="gguf") if peer else None
        self._dtype, self._probe, self._threads, self._logs = dtype, probe, threads, logs
        self._keep, self._seed, self._idle_limit = keep, seed, idle_limit

    def run(self, file: File, workloads: Sequence[str], runs: int) -> None:
        """Measures each workload `runs` times with each engine."""
        loaded = [file.fitted(WORKLOADS[name]) for name in workloads if name in WORKLOADS]
        if loaded:
            self._loaded(file, loaded, runs)
        if START in workloads:
            self._start(file, runs)

    def _engines(self, *, with_tokenizer: bool = False) -> list[Engine]:
        return [our_engine(self._dtype, with_tokenizer=with_tokenizer), *([self._peer] if self._peer else [])]

    def _process(self, engine: Engine, file: File) -> EngineProcess:
        log = self._logs / f"{engine.name}-{file.name}.log"
        return EngineProcess(engine, file.path, threads=self._threads, max_len=file.context, log=log, kv_bytes=KV_BYTES)

    def _loaded(self, file: File, workloads: Sequence[Workload], runs: int) -> None:
        with contextlib.ExitStack() as stack:
            alive: list[EngineProcess] = []
            for engine in self._engines():
                process = self._process(engine, file)
                stack.callback(process.stop)
                try:
                    if why := process.start():
                        raise EngineFailed(why)
                except EngineFailed as e:
                    print(e, flush=True)
                    for workload in workloads:
                        self._lost(engine, file, workload.name, e)
                    continue
                print(f"{engine.name} {process.version} ({file.name}): {process.says}", flush=True)
                alive.append(process)
            for workload in workloads:
                print(f"{file.name}, {workload}", flush=True)
                for run in (WARM_UP, *range(runs)):
                    for process in list(alive):
                        try:
                            self._one(process, file, workload, run)
                        except EngineFailed as e:
                            print(e, flush=True)
                            self._lost(process.engine, file, workload.name, e)
                            alive.remove(process)

    def _one(self, process: EngineProcess, file: File, workload: Workload, run: int) -> None:
        prompts = prompts_of(workload, run, file.vocab_size, self._seed)
        if run == WARM_UP:
            process.run(prompts, min(workload.output, 8), workload.shared)
            return
        idle, before = wait_until_idle(self._idle_limit), self._probe.rates()
        done = process.run(prompts, workload.output, workload.shared)
        record = self._record(process, file, workload.name, run, done.seconds)
        self._keep(dataclasses.replace(record, before=before, after=self._probe.rates(), idle=idle))

    def _start(self, file: File, runs: int) -> None:
        prompts_like = Workload(START, requests=1, shared=0, own=32, output=1)
        engines = self._engines(with_tokenizer=True)
        print(f"{file.name}, {prompts_like}, in a new process", flush=True)
        for run in (WARM_UP, *range(runs)):
            for engine in list(engines):
                idle, before = wait_until_idle(self._idle_limit), self._probe.rates()
                begin = time.perf_counter()
                process = self._process(engine, file)
                try:
                    if why := process.start():
                        raise EngineFailed(why)
                    done = process.run(prompts_of(prompts_like, run, file.vocab_size, self._seed), 1, 0)
                    seconds = time.perf_counter() - begin
                except EngineFailed as e:
                    print(e, flush=True)
                    self._lost(engine, file, START, e)
                    engines.remove(engine)
                    continue
                finally:
                    process.stop()
                if run == WARM_UP:
                    continue
                measured = ((START, seconds), (LOADED, process.load_seconds + done.seconds))
                after = self._probe.rates()
                for name, each in measured:
                    record = self._record(process, file, name, run, each)
                    self._keep(dataclasses.replace(record, before=before, after=after, idle=idle))

    def _record(self, process: EngineProcess, file: File, workload: str, run: int, seconds: float) -> Record:
        engine = process.engine
        more = {"threads": self._threads, "dtype": self._dtype if engine.ours else "", "says": process.says}
        key = (workload, file.name, engine.name, engine.ours, process.version)
        return Record(*key, run=run, seconds=seconds, weights=engine.weights, more=more)

    def _lost(self, engine: Engine, file: File, workload: str, error: Exception) -> None:
        self._keep(Record(workload, file.name, engine.name, engine.ours, note=str(error).splitlines()[0]))


# ---------------------------------------------------------------------------------------------------------- the table


HEAD = (
    "| file | workload | mvllm s | llama.cpp s | llama.cpp / mvllm | of each pair | runs | threads | dtype | "
    "read GB/s around | |\n|---|---|---|---|---|---|---|---|---|---|---|"
)


def render_files(records: Sequence[Record]) -> str:
    """The table, in Markdown: medians, their ratio, and the ratios of runs that followed each other."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.precision, record.workload), []).append(record)
    lines = [HEAD]
    for (file, workload), found in groups.items():
        ours = {r.run: r.seconds for r in found if r.ours and r.seconds is not None}
        theirs = {r.run: r.seconds for r in found if not r.ours and r.seconds is not None}
        pairs = [theirs[run] / ours[run] for run in sorted(ours.keys() & theirs.keys())]
        medians = [statistics.median(each.values()) if each else None for each in (ours, theirs)]
        ratio = f"{medians[1] / medians[0]:.2f}" if medians[0] and medians[1] else "-"
        reads = [rates.read for r in found for rates in (r.before, r.after) if rates is not None and rates.read]
        flags = list(dict.fromkeys(r.note for r in found if r.note))
        if not all(r.idle for r in found):
            flags.insert(0, "machine not idle")
        more = next((r.more for r in found if r.ours and r.more), {})
        cells = [
            *(file, workload),
            *("-" if median is None else f"{median:.3f}" for median in medians),
            ratio,
            f"{min(pairs):.2f}-{max(pairs):.2f}" if pairs else "-",
            *(f"{len(ours)}+{len(theirs)}", str(more.get("threads", "-")), more.get("dtype", "-")),
            f"{min(reads):.0f}-{max(reads):.0f}" if reads else "-",
            "; ".join(flags),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    builds = {r.engine: f"{r.engine} {r.version}: {r.more['says']}" for r in records if r.more.get("says")}
    return "\n".join([*lines, "", *(re.sub(r"\s*\|\s*", ", ", build) for build in builds.values())])

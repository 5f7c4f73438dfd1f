"""Memory and decode rate of large mixtures of experts, compared with the least bytes that a token reads.

    python -m tests.perf.large_mixtures --folder FOLDER [--model gpt-oss gpt-oss-gguf qwen3] [--format q4_0]
        [--layers 1] [--peers FOLDER] [--rounds 2]

Writes random-weight checkpoints of gpt-oss-20b and Qwen3-30B-A3B (13.8, 12.1 and 17.2 GB, see `mixture_files.py`),
unless they are in the folder, then runs each in a process of its own. A prompt of 1,024 random tokens first reads
nearly all experts; each run is one sequence of 32 tokens, 64 new ones, greedy. With `--peers`, llama.cpp runs on the
same GGUF files: each round loads and runs one engine after the other, because memory holds only one of them.

    peak, steady   proportional set size of all the engine's processes: largest while it loads, and after the runs
    decode         new tokens per second after the first one, median of the runs
    floor          bytes of the experts that a token is routed to, and of all other weights but the embedding, in the
                   checkpoint's formats, divided by the read bandwidth measured before and after the runs

`--layers` keeps the first layers only, `--vocab-size` makes embedding and head smaller: for a trial.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.perf.cpu_bench.engine_process import EngineFailed, EngineProcess
from tests.perf.cpu_bench.engines import Engine, installed_peers
from tests.perf.cpu_bench.machine import Probe, describe, wait_until_idle
from tests.perf.mixture_files import (
    GGUF_FORMATS,
    Mixture,
    gpt_oss,
    gpt_oss_gguf,
    qwen3,
    write_gpt_oss,
    write_gpt_oss_gguf,
    write_qwen3,
)

PROMPT, OUTPUT, LONG_PROMPT = 32, 64, 1024
LAYERS = {"gpt-oss": 24, "gpt-oss-gguf": 24, "qwen3": 48}
VOCAB = {"gpt-oss": 201_088, "gpt-oss-gguf": 201_088, "qwen3": 151_936}
MAX_LEN = 2048
SAMPLE_SECONDS = 0.5


# ------------------------------------------------------------------------------------------------- the engine's process


def child(path: str, vocab_size: int, runs: int, settings: dict[str, Any]) -> None:
    """Loads the engine and runs it. Prints one JSON line per step, and waits for a line of input before the next."""
    from mvllm import LLM, SamplingParams

    def tell(**fields: object) -> None:
        print(json.dumps(fields), flush=True)
        sys.stdin.readline()

    defaults: dict[str, Any] = {
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 256 << 20,
        "max_model_len": MAX_LEN,
        "use_tqdm_on_load": False,
    }
    begin = time.perf_counter()
    with LLM(path, **(defaults | settings)) as llm:
        tell(load_seconds=time.perf_counter() - begin)

        def generate(run: int, count: int, length: int = PROMPT, **more: Any) -> tuple[float, Any]:
            rng = random.Random(f"{run}-{count}")
            prompt = {"prompt_token_ids": [rng.randrange(16, vocab_size) for _ in range(length)]}
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, **more)
            start = time.perf_counter()
            (result,) = llm.generate([prompt], params, use_tqdm=False)
            seconds = time.perf_counter() - start
            assert len(result.outputs[0].token_ids) == count
            return seconds, result.outputs[0]

        prompt_seconds, _ = generate(-1, 1, LONG_PROMPT)
        _, output = generate(-1, 4, logprobs=1)
        values = [entry.logprob for step in output.logprobs for entry in step.values()]
        finite = all(math.isfinite(value) for value in values)
        found = [(generate(run, 1)[0], generate(run, OUTPUT)) for run in range(runs)]
        distinct = len(set(found[-1][1][1].token_ids))
        tell(
            prompt_seconds=prompt_seconds,
            first=[first for first, _ in found],
            whole=[seconds for _, (seconds, _) in found],
            finite=finite,
            distinct=distinct,
        )


# ------------------------------------------------------------------------------------------------------------- memory


@dataclass(frozen=True)
class Memory:
    """Proportional set size in bytes: of private and shared memory, and of mapped files."""

    anonymous: int
    files: int

    @property
    def total(self) -> int:
        """Both."""
        return self.anonymous + self.files

    def __str__(self) -> str:
        return f"{self.total / 1e9:.2f} GB ({self.files / 1e9:.2f} of mapped files)"


def memory_of(pid: int) -> Memory:
    """Of a process and its descendants; a process that ends meanwhile counts 0."""
    anonymous = files = 0
    try:
        pids = [pid, *(each.pid for each in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return Memory(0, 0)
    for each in pids:
        try:
            text = Path(f"/proc/{each}/smaps_rollup").read_text()
        except OSError:
            continue
        kib = {name: int(value) for name, value in re.findall(r"^(Pss\w*):\s+(\d+) kB", text, flags=re.MULTILINE)}
        files += 1024 * kib.get("Pss_File", 0)
        anonymous += 1024 * (kib["Pss"] - kib.get("Pss_File", 0))
    return Memory(anonymous, files)


class MemorySampler:
    """Samples a process and its descendants until it is stopped; `peak` is the largest sample."""

    def __init__(self, pid: int) -> None:
        self._pid, self._stop = pid, threading.Event()
        self.peak = Memory(0, 0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self.peak = max(self.peak, memory_of(self._pid), key=lambda memory: memory.total)

    def stop(self) -> Memory:
        """The peak."""
        self._stop.set()
        self._thread.join()
        return self.peak


# -------------------------------------------------------------------------------------------------------- measurement


@dataclass(frozen=True)
class Result:
    """One model's run.

    Attributes:
        peak, steady: Memory while it loaded, and after the runs.
        first, whole: Seconds of each run with one new token and with OUTPUT.
        read: Read bandwidth before and after the runs, GB/s; empty if it cannot be measured.
    """

    load_seconds: float
    prompt_seconds: float
    peak: Memory
    steady: Memory
    first: list[float]
    whole: list[float]
    read: list[float]
    finite: bool
    distinct: int
    idle: bool

    def rate(self) -> float:
        """Tokens per second after the first, median."""
        return rate_of(self.first, self.whole)


def rate_of(first: list[float], whole: list[float]) -> float:
    """Tokens per second after the first, median of runs with one new token and with OUTPUT."""
    return statistics.median((OUTPUT - 1) / (w - f) for f, w in zip(first, whole, strict=True))


def measure(mixture: Mixture, options: argparse.Namespace) -> Result:
    """Runs the engine on a checkpoint.

    Raises:
        SystemExit: The engine's process ended early; its output is on standard error.
    """
    settings = dict(option.split("=", 1) for option in options.setting)
    given = json.dumps({name: json.loads(value) for name, value in settings.items()})
    command = [sys.executable, "-m", "tests.perf.large_mixtures", "--folder", str(options.folder), "--child"]
    command += [str(mixture.path), str(mixture.vocab_size), str(options.runs), given]
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads), "MVLLM_LOGGING_LEVEL": "WARNING"}
    with (
        Probe(options.folder, options.threads) as probe,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        sampler = MemorySampler(process.pid)
        try:
            loaded = _answer(process)
        finally:
            peak = sampler.stop()
        idle, read = wait_until_idle(options.idle_limit), [probe.read_bandwidth()]
        process.stdin.write("\n")
        process.stdin.flush()
        ran = _answer(process)
        steady = memory_of(process.pid)
        read.append(probe.read_bandwidth())
        process.stdin.write("\n")
        process.stdin.close()
    peak = max(peak, steady, key=lambda memory: memory.total)
    known = {"peak": peak, "steady": steady, "read": [each for each in read if each], "idle": idle}
    return Result(**loaded, **ran, **known)


def measure_peer(peer: Engine, mixture: Mixture, options: argparse.Namespace) -> tuple[float, list[float]]:
    """Tokens per second of llama.cpp after the first one, and the read bandwidth before and after, GB/s.

    Raises:
        EngineFailed: It did not start, or it ended early.
    """
    log = options.folder / "llama.cpp.log"
    process = EngineProcess(peer, mixture.path, threads=options.threads, max_len=MAX_LEN, log=log)
    rng = random.Random(mixture.vocab_size)

    def seconds(count: int) -> float:
        prompt = [rng.randrange(16, mixture.vocab_size) for _ in range(PROMPT)]
        return process.run([prompt], count, 0).seconds

    with Probe(options.folder, options.threads) as probe:
        try:
            if why := process.start():
                raise EngineFailed(why)
            seconds(1)  # the first one allocates
            wait_until_idle(options.idle_limit)
            read = [probe.read_bandwidth()]
            found = [(seconds(1), seconds(OUTPUT)) for _ in range(options.runs)]
            read.append(probe.read_bandwidth())
        finally:
            process.stop()
    return rate_of([first for first, _ in found], [whole for _, whole in found]), [each for each in read if each]


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            return json.loads(line)
    raise SystemExit(f"error: the engine's process ended with status {process.wait()}; its output is above")


def report(name: str, mixture: Mixture, result: Result) -> Iterator[str]:
    """The lines to print."""
    experts, dense = mixture.bytes_per_token()
    yield f"{name}: checkpoint {mixture.num_bytes / 1e9:.2f} GB, loaded in {result.load_seconds:.1f} s"
    yield f"  peak memory    {result.peak}"
    yield f"  steady memory  {result.steady}, {result.steady.total / mixture.num_bytes:.2f} x the checkpoint"
    rate = result.rate()
    first = statistics.median(result.first)
    yield f"  prompt         {LONG_PROMPT} tokens in {result.prompt_seconds:.2f} s, the engine's first"
    yield f"  decode         {rate:.2f} tokens/s, {1e3 / rate:.1f} ms a token; first token after {first:.2f} s"
    yield (
        f"  a token reads  {(experts + dense) / 1e9:.3f} GB: {experts / 1e9:.3f} of the experts that it is routed to, "
        f"{dense / 1e9:.3f} of all other weights"
    )
    if result.read:
        bandwidth = statistics.mean(result.read)
        floor = (experts + dense) / bandwidth / 1e9
        yield (
            f"  floor          {1e3 * floor:.1f} ms a token at {bandwidth:.1f} GB/s read ("
            f"{', '.join(f'{each:.1f}' for each in result.read)} before and after); "
            f"time / floor {1 / rate / floor:.2f}, {floor * rate:.0%} of the floor's rate"
        )
    yield f"  output         {result.distinct} distinct tokens of {OUTPUT}, log-probabilities " + (
        "finite" if result.finite else "NOT FINITE"
    )
    if not result.idle:
        yield "  the machine was not idle: the times say little"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoints; 13.8 + 12.1 + 17.2 GB")
    parser.add_argument("--model", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--format", choices=GGUF_FORMATS, default="q4_0", help="of qwen3 (q4_0)")
    parser.add_argument("--layers", type=int, help="default: all")
    parser.add_argument("--vocab-size", type=int, help="default: the model's")
    parser.add_argument("--only-write", action="store_true", help="write the checkpoints, and run nothing")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--peers", type=Path, help="folder of virtual environments, one of them with llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=1, help="of loading and measuring, with each engine")
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    parser.add_argument("--idle-limit", type=float, default=120.0, help="seconds to wait for an idle machine (120)")
    parser.add_argument("--setting", action="append", default=[], metavar="NAME=JSON", help="of the engine")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        path, vocab_size, runs, settings = options.child
        child(path, int(vocab_size), int(runs), json.loads(settings))
        return
    print(f"{describe()}; {options.threads} threads; one sequence of {PROMPT} tokens, {OUTPUT} new ones", flush=True)
    peer = next((each for each in installed_peers(options.peers) if each.runner.name == "run_llama_cpp.py"), None)
    for name in options.model:
        layers, vocab_size = options.layers or LAYERS[name], options.vocab_size or VOCAB[name]
        start = time.perf_counter()
        try:
            mixture = written(name, layers, vocab_size, options)
        except OSError as e:
            raise SystemExit(f"error: {e}") from e
        print(f"{mixture.path} is complete, after {time.perf_counter() - start:.1f} s", flush=True)
        for _ in range(0 if options.only_write else options.rounds):
            print("\n".join(report(f"{name}, {layers} layers", mixture, measure(mixture, options))), flush=True)
            if peer is None or mixture.path.suffix != ".gguf":
                continue
            try:
                rate, read = measure_peer(peer, mixture, options)
            except EngineFailed as e:
                raise SystemExit(f"error: {e}") from e
            around = ", ".join(f"{each:.1f}" for each in read)
            print(f"  llama.cpp      {rate:.2f} tokens/s, at {around} GB/s read before and after", flush=True)


def written(name: str, layers: int, vocab_size: int, options: argparse.Namespace) -> Mixture:
    """The checkpoint of that name, written if it is missing.

    Raises:
        OSError: The disk has no room; nothing was written.
    """
    folder: Path = options.folder
    match name:
        case "gpt-oss":
            mixture = gpt_oss(folder, layers, vocab_size)
            write_gpt_oss(mixture, layers)
        case "gpt-oss-gguf":
            mixture = gpt_oss_gguf(folder, layers, vocab_size)
            write_gpt_oss_gguf(mixture, layers)
        case _:
            mixture = qwen3(folder, layers, vocab_size, options.format)
            write_qwen3(mixture, layers)
    return mixture


if __name__ == "__main__":
    main()

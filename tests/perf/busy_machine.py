"""Time of a model on a machine that is not idle, relative to an idle machine: python -m tests.perf.busy_machine

    idle         no neighbour
    busy         beside neighbours: processes with an endless loop
    pulses       beside neighbours that pause every other second
    one thread   one compute thread, no neighbour (`--one-thread`)
    quota N      within a control group with a quota of N CPUs (`--quota`; needs the right to create one)
    two engines  beside a second engine with the same work (`--two-engines`)

Each engine has a process of its own and stays loaded; the cases alternate, round after round. The table shows the
median seconds of all rounds, and the median of the ratio to `idle` in the same round, with the smallest and the
largest; for quotas also the ratio to `one thread`. A round of a case is one run, or as many as fill its least time,
such as two periods of `pulses`; it is repeated if other programs used a tenth of a core.

On two cores with one neighbour, a fair share of the machine is 1.33 times the idle time for work that all threads
compute. A single stream is limited by the memory: one thread alone takes 1.2 to 1.8 times, depending on the processor.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.perf.cpu_bench.machine import busy_seconds, describe, wait_until_idle
from tests.perf.perf_models import checkpoint

WORK = {"single": (1, 32, 128), "requests": (32, 256, 64), "prompt": (1, 2048, 1)}
"""Requests, tokens of each prompt, new tokens of each."""

LOOPS = {
    "busy": "while True: pass",
    "pulses": "import time\nwhile True:\n    end = time.monotonic() + 1\n    while time.monotonic() < end: pass\n"
    "    time.sleep(1)",
}
FORMS = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "float32": {"dtype": "float32"},
}
OTHER_PROGRAMS = 0.1
"""Cores that other programs may use during a run."""

REPEATS = 3
"""Attempts at a measurement that other programs disturb."""

LEAST_SECONDS = {"pulses": 4.0}
"""Time that the runs of a measurement fill."""


def serve_runs(model: str, form: str, work: str) -> None:
    """The engine's process. Each line of the standard input is the least time of a measurement: runs that fill this
    time. The line of the output has their mean, their sum, and the computing time of all threads, in seconds."""
    from mvllm import LLM, SamplingParams

    count, prompt, new = WORK[work]
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    with LLM(
        model,
        skip_tokenizer_init=True,
        platform="cpu",
        enable_prefix_caching=False,
        kv_cache_memory_bytes=1 << 30,
        use_tqdm_on_load=False,
        **FORMS[form],
    ) as llm:
        number = itertools.count()
        for line in sys.stdin:
            seconds: list[float] = []
            computed = time.process_time()
            while sum(seconds) < float(line) or not seconds:
                run = next(number)
                prompts = [
                    {"prompt_token_ids": [3 + (7 * (i + 31 * run) + 13 * j) % 31_000 for j in range(prompt)]}
                    for i in range(count)
                ]
                begin = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                seconds.append(time.perf_counter() - begin)
            print(json.dumps([statistics.mean(seconds), sum(seconds), time.process_time() - computed]), flush=True)


class Engine:
    """An engine in a process of its own. A context manager.

    Args:
        arguments: Of `serve_runs`.
        environment: Variables beside those of this process.
        group: Folder of the control group to start in, or None.
    """

    def __init__(self, arguments: tuple[str, str, str], environment: dict[str, str], group: Path | None = None) -> None:
        command = [sys.executable, "-m", "tests.perf.busy_machine", "--serve", *arguments]
        if group is not None:
            command = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *command]
        self._process = subprocess.Popen(
            command,
            env={"MVLLM_LOGGING_LEVEL": "WARNING"} | os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Engine:
        self.start()
        self.finish()  # not counted: memory is touched, and the decode step recorded
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()

    def start(self, least_seconds: float = 0.0) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{least_seconds}\n")
        self._process.stdin.flush()

    def finish(self) -> tuple[float, float, float]:
        """Seconds of a run, of all runs, and of all threads together."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("The engine's process has ended; its message is above.")
        seconds, total, computed = json.loads(line)
        return seconds, total, computed


@contextlib.contextmanager
def neighbours(case: str, count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that use the cores as `case` says."""
    command = [sys.executable, "-S", "-E", "-c", LOOPS[case]] if case in LOOPS else []
    started = [subprocess.Popen(command) for _ in range(count if command else 0)]
    try:
        if started:
            time.sleep(0.2)
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


@contextlib.contextmanager
def control_group(cpus: float) -> Iterator[Path]:
    """A control group, version 1 or 2, whose processes may use `cpus` CPUs.

    Raises:
        SystemExit: The group cannot be created.
    """
    root, period = Path("/sys/fs/cgroup"), 100_000
    version_1 = (root / "cpu" / "cpu.cfs_quota_us").exists() or (root / "cpu" / "cgroup.procs").exists()
    group = (root / "cpu" if version_1 else root) / f"mvllm-busy-machine-{os.getpid()}-{cpus:g}"
    try:
        group.mkdir()
        if version_1:
            (group / "cpu.cfs_quota_us").write_text(str(int(cpus * period)))
        else:
            (root / "cgroup.subtree_control").write_text("+cpu")
            (group / "cpu.max").write_text(f"{int(cpus * period)} {period}")
    except OSError as e:
        with contextlib.suppress(OSError):
            group.rmdir()
        raise SystemExit(f"--quota {cpus:g} needs the right to create a control group: {e}") from e
    try:
        yield group
    finally:
        group.rmdir()


def processor_seconds(processes: list[subprocess.Popen[bytes]]) -> float:
    """Computing time of the processes up to now."""
    ticks = 0
    for process in processes:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(case: str, engines: list[Engine], options: argparse.Namespace) -> tuple[float, bool]:
    """Mean seconds of one run of each engine at the same time, and whether other programs left the cores alone."""
    for _ in range(REPEATS):
        idle = wait_until_idle(options.idle_limit)
        with neighbours(case, options.neighbours) as loops:
            before = busy_seconds() - processor_seconds(loops)
            for engine in engines:
                engine.start(LEAST_SECONDS.get(case, 0.0))
            runs = [engine.finish() for engine in engines]
            others = busy_seconds() - processor_seconds(loops) - before - sum(computed for _, _, computed in runs)
        seconds = statistics.mean(seconds for seconds, _, _ in runs)
        if idle and others < OTHER_PROGRAMS * max(1.0, *(total for _, total, _ in runs)):
            return seconds, True
    return seconds, False


COLUMNS = ("form", "work", "case", "seconds", "times idle", "of each round", "times one thread", "rounds", "")
HEAD = f"| {' | '.join(COLUMNS)} |\n" + "|---" * len(COLUMNS) + "|"


def rows(form: str, work: str, seconds: dict[str, list[float]], undisturbed: dict[str, bool]) -> Iterator[str]:
    """The table's lines of a form and a workload: `seconds` has one run of each round, by case."""

    def ratios(case: str, to: str) -> list[float]:
        return [mine / other for mine, other in zip(seconds[case], seconds[to], strict=True)]

    for case, found in seconds.items():
        of_idle = ratios(case, "idle")
        compares = case.startswith("quota") and "one thread" in seconds
        cells = [
            *(form, work, case),
            f"{statistics.median(found):.3f}",
            f"{statistics.median(of_idle):.2f}",
            f"{min(of_idle):.2f}-{max(of_idle):.2f}",
            f"{statistics.median(ratios(case, 'one thread')):.2f}" if compares else "",
            str(len(found)),
            "" if undisturbed[case] else "beside other programs",
        ]
        yield f"| {' | '.join(cells)} |"


def table(model: str, form: str, work: str, options: argparse.Namespace) -> Iterator[str]:
    """Measures a form and a workload in all cases."""
    with contextlib.ExitStack() as stack:

        def start(environment: dict[str, str] | None = None, group: Path | None = None) -> Engine:
            return stack.enter_context(Engine((model, form, work), environment or {}, group))

        all_cores = start()
        engines = {case: [all_cores] for case in ("idle", *options.cases)}
        if options.one_thread:
            engines["one thread"] = [start({"OMP_NUM_THREADS": "1"})]
        for cpus in options.quota:
            engines[f"quota {cpus:g}"] = [start(group=stack.enter_context(control_group(cpus)))]
        if options.two_engines:
            engines["two engines"] = [all_cores, start()]
        seconds: dict[str, list[float]] = {case: [] for case in engines}
        undisturbed = dict.fromkeys(engines, True)
        for _ in range(options.rounds):
            for case, running in engines.items():
                run, alone = measure(case, running, options)
                seconds[case].append(run)
                undisturbed[case] &= alone
        yield from rows(form, work, seconds, undisturbed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a GGUF file; default: 162 M parameters")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--cases", nargs="*", choices=LOOPS, default=list(LOOPS), help="beside idle; default: all")
    parser.add_argument("--work", nargs="+", choices=WORK, default=list(WORK))
    parser.add_argument("--neighbours", type=int, default=1)
    parser.add_argument("--one-thread", action="store_true")
    parser.add_argument("--quota", nargs="+", type=float, default=[], metavar="CPUS", help="for example: 1 1.5")
    parser.add_argument("--two-engines", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--idle-limit", type=float, default=60.0, help="seconds to wait for an idle machine (60)")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve_runs(*options.serve)
        return
    model = options.model or str(checkpoint("small"))
    print(f"{describe()}; {options.neighbours} neighbours; {model}\n\n{HEAD}", flush=True)
    for form in options.forms:
        for work in options.work:
            print("\n".join(table(model, form, work, options)), flush=True)


if __name__ == "__main__":
    main()

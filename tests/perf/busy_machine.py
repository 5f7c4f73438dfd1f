"""Time of a model beside other programs, relative to an idle machine: python -m tests.perf.busy_machine

Each case runs in a process of its own. A neighbour is a process with an endless loop:

    idle      no neighbour
    busy      all the time
    pulses    one second on, one second off

The cases alternate, round after round. The table shows the median seconds of all runs of a case, and the median over
the rounds of its ratio to `idle` in the same round, with the smallest and the largest. On two cores with one neighbour,
a fair share of the machine is 1.33 times the idle time for work that all threads compute, and one thread alone takes
1.2 to 1.5 times for a single stream. `--one-thread` adds that case.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from tests.perf.cpu_bench.machine import describe, wait_until_idle
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


@contextlib.contextmanager
def neighbours(case: str, count: int) -> Iterator[None]:
    """Processes that use the cores as `case` says."""
    command = [sys.executable, "-c", LOOPS[case]] if case in LOOPS else []
    started = [subprocess.Popen(command) for _ in range(count if command else 0)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def measure(model: str, form: str, work: str, runs: int) -> list[float]:
    """Seconds of each run, after one that is not counted."""
    from mvllm import LLM, SamplingParams

    count, prompt, new = WORK[work]
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    seconds = []
    with LLM(
        model,
        skip_tokenizer_init=True,
        platform="cpu",
        enable_prefix_caching=False,
        kv_cache_memory_bytes=1 << 30,
        use_tqdm_on_load=False,
        **FORMS[form],
    ) as llm:
        for run in range(runs + 1):
            prompts = [
                {"prompt_token_ids": [3 + (7 * (i + 31 * run) + 13 * j) % 31_000 for j in range(prompt)]}
                for i in range(count)
            ]
            begin = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def measure_in_process(model: str, form: str, work: str, case: str, options: argparse.Namespace) -> list[float]:
    """`measure` in a process of its own, beside the neighbours of the case."""
    environment = {"MVLLM_LOGGING_LEVEL": "WARNING"} | os.environ
    if case == "one thread":
        environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-m", "tests.perf.busy_machine", "--runs", str(options.runs)]
    command += ["--child", model, form, work]
    with neighbours(case, options.neighbours):
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


HEAD = (
    "| form | work | case | seconds | times idle | of each round | rounds x runs | |\n|---|---|---|---|---|---|---|---|"
)


def rows(name: str, work: str, seconds: dict[str, list[list[float]]], idle: bool) -> Iterator[str]:
    """The table's lines of a form and a workload: `seconds` has the runs of each round, by case."""
    for case, found in seconds.items():
        ratios = [statistics.median(r) / statistics.median(i) for r, i in zip(found, seconds["idle"], strict=True)]
        cells = [
            *(name, work, case),
            f"{statistics.median([each for runs in found for each in runs]):.3f}",
            f"{statistics.median(ratios):.2f}",
            f"{min(ratios):.2f}-{max(ratios):.2f}",
            f"{len(found)} x {len(found[0])}",
            "" if idle else "machine not idle",
        ]
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a GGUF file; default: 162 M parameters")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--cases", nargs="+", choices=LOOPS, default=list(LOOPS), help="beside idle; default: all")
    parser.add_argument("--work", nargs="+", choices=WORK, default=list(WORK))
    parser.add_argument("--neighbours", type=int, default=1)
    parser.add_argument("--one-thread", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--idle-limit", type=float, default=60.0, help="seconds to wait for an idle machine (60)")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(*options.child, options.runs)))
        return
    model = options.model or str(checkpoint("small"))
    cases = ["idle", *options.cases, *(["one thread"] if options.one_thread else [])]
    print(f"{describe()}; {options.neighbours} neighbours; {model}\n\n{HEAD}", flush=True)
    for form in options.forms:
        for work in options.work:
            seconds: dict[str, list[list[float]]] = {case: [] for case in cases}
            idle = True
            for _ in range(options.rounds):
                for case in cases:
                    idle &= wait_until_idle(options.idle_limit)
                    seconds[case].append(measure_in_process(model, form, work, case, options))
            print("\n".join(rows(form, work, seconds, idle)), flush=True)


if __name__ == "__main__":
    main()

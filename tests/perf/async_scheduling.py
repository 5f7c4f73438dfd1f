"""Gain of asynchronous scheduling, and cost of a separate engine-core process.

    python tests/perf/async_scheduling.py [--runs 3] [--model tiny small]

Offline generation with greedy sampling: 32 requests of 32 prompt and 64 output tokens. The configurations combine the
worker in the engine's process (`uni`) or in its own (`mp`), the engine core in the caller's process or in its own, and
asynchronous scheduling off and on. Configurations alternate, each time in a new process, so that slow changes of the
machine's speed affect all of them alike. Prints the median of output tokens per second, and the median ratio to the
first configuration in the same round. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from perf_models import SHAPES, checkpoint

REQUESTS, PROMPT, OUTPUT = 32, 32, 64
GENERATIONS = 5  # per program; the first is a warm-up
WAYS = [
    {"executor": executor, "own_process": own_process, "asynchronous": asynchronous}
    for executor in ("uni", "mp")
    for own_process in (False, True)
    for asynchronous in (False, True)
]


def measure(name: str, way: dict) -> float:
    """Output tokens per second of one configuration, the best of a few generations."""
    from mvllm import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, detokenize=False)
    seconds = []
    with LLM(
        model=str(checkpoint(name)),
        skip_tokenizer_init=True,
        use_tqdm_on_load=False,
        kv_cache_memory_bytes=2**28,
        distributed_executor_backend=way["executor"],
        engine_core_process=way["own_process"],
        async_scheduling=way["asynchronous"],
    ) as llm:
        for run in range(GENERATIONS):
            rng = random.Random(run)
            prompts = [
                {"prompt_token_ids": [rng.randrange(16, SHAPES[name]["vocab_size"]) for _ in range(PROMPT)]}
                for _ in range(REQUESTS)
            ]
            begin = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds.append(time.perf_counter() - begin)
            assert all(len(output.outputs[0].token_ids) == OUTPUT for output in outputs)
    return REQUESTS * OUTPUT / min(seconds[1:])


def compare(name: str, runs: int) -> None:
    checkpoint(name)
    rates: list[list[float]] = [[] for _ in WAYS]
    for _ in range(runs):
        for way, found in zip(WAYS, rates):
            command = [sys.executable, __file__, "--measure", name, json.dumps(way)]
            answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            found.append(float(answer.stdout.split()[-1]))
    print(f"model {name}")
    print(f"  {'worker':6}  {'engine core':12}  {'asynchronous':12}  {'tokens/s':>10}  {'ratio':>6}")
    for way, found in zip(WAYS, rates):
        ratio = statistics.median(mine / first for mine, first in zip(found, rates[0]))
        print(
            f"  {way['executor']:6}  {'own process' if way['own_process'] else 'caller':12}  "
            f"{'on' if way['asynchronous'] else 'off':12}  {statistics.median(found):10,.0f}  {ratio:6.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--model", nargs="+", default=["tiny", "small"], choices=list(SHAPES))
    parser.add_argument("--measure", nargs=2, metavar=("MODEL", "WAY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(measure(args.measure[0], json.loads(args.measure[1])))
        return
    for name in args.model:
        compare(name, args.runs)


if __name__ == "__main__":
    main()

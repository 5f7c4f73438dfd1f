"""What planning a step while the one before runs gives, and what a process of its own costs the engine core.

    python tests/perf/async_scheduling.py [--runs 5] [--model tiny small]

Offline generation with greedy sampling: 32 requests of 32 prompt and 64 output tokens, with workers in the engine's
process (`uni`) or in one of their own (`mp`), the engine core in the caller's process or in its own, and asynchronous
scheduling off and on. All engines of a model live at once and take turns, so that a machine that drifts is fair to
each. Prints the median of output tokens per second, and the ratio to the first row of the same runs. Run it on an idle
machine.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from perf_models import SHAPES, checkpoint

REQUESTS, PROMPT, OUTPUT = 32, 32, 64
WAYS = [
    (executor, own_process, asynchronous)
    for executor in ("uni", "mp")
    for own_process in (False, True)
    for asynchronous in (False, True)
]


def compare(name: str, runs: int) -> None:
    from mvllm import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, detokenize=False)
    rates: dict[tuple[str, bool, bool], list[float]] = {way: [] for way in WAYS}
    with contextlib.ExitStack() as stack:
        engines = {
            way: stack.enter_context(
                LLM(
                    model=str(checkpoint(name)),
                    skip_tokenizer_init=True,
                    use_tqdm_on_load=False,
                    kv_cache_memory_bytes=2**28,
                    distributed_executor_backend=way[0],
                    engine_core_process=way[1],
                    async_scheduling=way[2],
                )
            )
            for way in WAYS
        }
        expected = {}
        for run in range(runs + 1):
            rng = random.Random(run)
            prompts = [
                {"prompt_token_ids": [rng.randrange(16, SHAPES[name]["vocab_size"]) for _ in range(PROMPT)]}
                for _ in range(REQUESTS)
            ]
            for way, llm in engines.items():
                begin = time.perf_counter()
                outputs = llm.generate(prompts, params, use_tqdm=False)
                seconds = time.perf_counter() - begin
                tokens = [list(output.outputs[0].token_ids) for output in outputs]
                assert expected.setdefault(run, tokens) == tokens
                if run:  # the first is to warm up
                    rates[way].append(REQUESTS * OUTPUT / seconds)
    base = rates[WAYS[0]]
    print(f"model {name}")
    print(f"  {'worker':6}  {'engine core':12}  {'asynchronous':12}  {'tokens/s':>10}  {'ratio':>6}")
    for way in WAYS:
        executor, own_process, asynchronous = way
        ratio = statistics.median(mine / first for mine, first in zip(rates[way], base))
        print(
            f"  {executor:6}  {'own process' if own_process else 'caller':12}  {'on' if asynchronous else 'off':12}  "
            f"{statistics.median(rates[way]):10,.0f}  {ratio:6.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--model", nargs="+", default=["tiny", "small"], choices=list(SHAPES))
    args = parser.parse_args()
    for name in args.model:
        compare(name, args.runs)


if __name__ == "__main__":
    main()

"""Overhead of the engine around the model: output tokens per second with a model that computes almost nothing.

    python tests/perf/engine_overhead.py [--runs 5] [--platform null]

256 requests of 32 prompt and 64 output tokens on a one-layer model of width 64, offline. Prints the median rate and the
engine's time per step and per request and step. `--platform null` runs no model at all (mvllm-null-device must be
installed): this measures the engine without a worker's input preparation and sampling. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from perf_models import SHAPES, checkpoint

REQUESTS, PROMPT, OUTPUT = 256, 32, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--platform", help="The only available one by default.")
    args = parser.parse_args()
    from mvllm import LLM, SamplingParams

    seconds = []
    start = time.perf_counter()
    with LLM(
        model=str(checkpoint("tiny")),
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=2**28,
        max_num_batched_tokens=8192,
        platform=args.platform,
    ) as llm:
        for run in range(args.runs + 1):
            rng = random.Random(run)
            vocabulary = SHAPES["tiny"]["vocab_size"]
            prompts = [
                {"prompt_token_ids": [rng.randrange(16, vocabulary) for _ in range(PROMPT)]} for _ in range(REQUESTS)
            ]
            params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, detokenize=False)
            if run == 0:
                llm.generate(prompts[:2], SamplingParams(temperature=0, max_tokens=1, detokenize=False), use_tqdm=False)
                print(f"first token {time.perf_counter() - start:.2f} s after the call of LLM(...)")
                continue
            begin = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds.append(time.perf_counter() - begin)
            assert all(len(o.outputs[0].token_ids) == OUTPUT for o in outputs)
    took = statistics.median(seconds)
    steps = OUTPUT
    print(
        f"{REQUESTS * OUTPUT / took:,.0f} output tokens/s; {took / steps * 1e3:.2f} ms a step, "
        f"{took / steps / REQUESTS * 1e6:.1f} µs per request and step"
    )


if __name__ == "__main__":
    main()

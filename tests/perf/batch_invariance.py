"""Cost of batch_invariant: python tests/perf/batch_invariance.py [--rounds 7] [--dtypes bfloat16 int8 float32]

An ordinary engine and one with batch_invariant run in one process and alternate. Measured are a decode step of 1 and of
32 requests, with and without log-probabilities, decode steps of 1 request after 2,000 tokens, and a prompt of 2,048
tokens (its keys and values are not cached). Each line has the medians over the rounds and the median of the rounds'
ratios. Llama of 162 M parameters, random token ids. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from perf_models import checkpoint

from mvllm import LLM, SamplingParams

STEPS = 16
PROMPT = 2048

SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
}


def seconds(llm: LLM, prompts: list[list[int]], **settings: Any) -> float:
    """Seconds of `generate`."""
    params = SamplingParams(**{"temperature": 0, "ignore_eos": True, "detokenize": False, **settings})
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return time.perf_counter() - start


def make_prompts(rng: random.Random, count: int, length: int) -> list[list[int]]:
    return [[rng.randrange(16, 32000) for _ in range(length)] for _ in range(count)]


def decode(llm: LLM, prompt_seed: int, /, *, batch: int, length: int = 32, **settings: Any) -> float:
    """Seconds of a decode step: the difference of a long and a short run over the same number of requests."""
    rng = random.Random(prompt_seed)
    short, long = (
        seconds(llm, make_prompts(rng, batch, length), max_tokens=count, **settings) for count in (1, 1 + STEPS)
    )
    return (long - short) / STEPS


def prefill(llm: LLM, seed: int) -> float:
    """Seconds of a prompt and its first token."""
    return seconds(llm, make_prompts(random.Random(seed), 1, PROMPT), max_tokens=1)


SAMPLED = {"temperature": 1.0, "top_p": 0.95, "seed": 1, "logprobs": 0}

CASES: dict[str, Callable[[LLM, int], float]] = {
    "decode of 1": lambda llm, seed: decode(llm, seed, batch=1),
    "decode of 32": lambda llm, seed: decode(llm, seed, batch=32),
    "decode of 1, sampled, logprobs": lambda llm, seed: decode(llm, seed, batch=1, **SAMPLED),
    "decode of 32, sampled, logprobs": lambda llm, seed: decode(llm, seed, batch=32, **SAMPLED),
    "decode of 1 after 2,000 tokens": lambda llm, seed: decode(llm, seed, batch=1, length=2000),
    "prompt of 2,048 tokens": prefill,
}


def measure(name: str, rounds: int) -> None:
    """Prints the lines of one dtype."""
    settings = {
        **SETTINGS[name],
        "model": str(checkpoint("small")),
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": 512 << 20,
        "max_model_len": 2304,
        "max_num_seqs": 32,
        "max_num_batched_tokens": PROMPT,
        "hf_overrides": {"max_position_embeddings": 4096},
        "enable_prefix_caching": False,
        "seed": 0,
    }
    with LLM(**settings) as ordinary, LLM(**settings, batch_invariant=True) as invariant:
        for case, run in CASES.items():
            run(ordinary, 0), run(invariant, 0)  # records the steps
            pairs = [(run(ordinary, seed), run(invariant, seed)) for seed in range(1, rounds + 1)]
            before, after = (statistics.median(column) * 1e3 for column in zip(*pairs, strict=True))
            ratio = statistics.median(mine / other for other, mine in pairs)
            print(f"{name:>9} {case:<32} {before:>12.3f} {after:>13.3f} {ratio:>6.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "int8", "float32"], choices=SETTINGS)
    args = parser.parse_args()
    print(f"{'dtype':>9} {'case':<32} {'ordinary ms':>12} {'invariant ms':>13} {'ratio':>6}")
    for name in args.dtypes:
        measure(name, args.rounds)


if __name__ == "__main__":
    main()

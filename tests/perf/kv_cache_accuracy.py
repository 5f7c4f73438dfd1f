"""Accuracy of 8-bit KV caches: perplexity of the demo model on held-out text, per storage dtype.

python -m tests.perf.kv_cache_accuracy [--documents 200] [--kernels 1|0]
"""

from __future__ import annotations

import argparse
import math
import os

from ci.demo_model import corpus
from mvllm import LLM, SamplingParams

KV_DTYPES = ("auto", "bfloat16", "float16", "int8", "fp8")


def perplexity(texts: list[str], **settings: object) -> tuple[float, int]:
    """Perplexity over all tokens except the first of each text, and KV cache bytes per token over all layers."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    total, count = 0.0, 0
    with LLM("demo", enable_prefix_caching=False, kv_cache_memory_bytes=1 << 26, **settings) as llm:
        summary = llm.llm_engine.cache_summary
        for output in llm.generate(texts, params, use_tqdm=False):
            for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
                total, count = total - entry[token].logprob, count + 1
    return math.exp(total / count), summary.total_bytes // summary.num_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--kernels", default="1", choices=("0", "1"))
    options = parser.parse_args()
    os.environ["MVLLM_CPU_KERNELS"] = options.kernels
    texts = list(corpus.documents("heldout", options.documents))
    print(f"{'dtype':>9} {'kv_cache_dtype':>14} {'bytes per token':>15} {'perplexity':>11}")
    for dtype in ("float32", "bfloat16"):
        for kv_dtype in KV_DTYPES:
            found, size = perplexity(texts, dtype=dtype, kv_cache_dtype=kv_dtype)
            print(f"{dtype:>9} {kv_dtype:>14} {size:>15} {found:>11.5f}", flush=True)


if __name__ == "__main__":
    main()

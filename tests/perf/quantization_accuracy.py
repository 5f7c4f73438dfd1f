"""What quantization costs in accuracy: the demo model's perplexity on held-out text, in one table.

    python tests/perf/quantization_accuracy.py [--documents 100] [--dtype bfloat16] [--only int8 int4]

Each row is an engine of its own. Its prompts are documents that the model was not trained on; the log-probabilities of
their tokens give the perplexity, exp of minus their mean. Beside what `quantization` offers, the table has the variants
that it was chosen from; these exist here only.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from mvllm import LLM, SamplingParams
from mvllm.demo import corpus
from mvllm.layers.quantization import registry
from mvllm.layers.quantization.on_load import OnLoad


class Int8WeightOnly(OnLoad):
    bits = 8


class Int4WholeRows(OnLoad):
    bits = 4


class Int4Groups128(OnLoad):
    bits, group_size = 4, 128


class Int4Groups64(OnLoad):
    bits, group_size = 4, 64


class Int4Groups32(OnLoad):
    bits, group_size = 4, 32


class Int4Groups128Zeros(OnLoad):
    bits, group_size, symmetric = 4, 128, False


class Int4Groups64Zeros(OnLoad):
    bits, group_size, symmetric = 4, 64, False


class Int4Groups32Zeros(OnLoad):
    bits, group_size, symmetric = 4, 32, False


VARIANTS: dict[str, type[OnLoad]] = {
    "int8, inputs as they are": Int8WeightOnly,
    "int4, a scale per row": Int4WholeRows,
    "int4, groups of 128": Int4Groups128,
    "int4, groups of 128, zero points": Int4Groups128Zeros,
    "int4, groups of 64": Int4Groups64,
    "int4, groups of 64, zero points": Int4Groups64Zeros,
    "int4, groups of 32": Int4Groups32,
    "int4, groups of 32, zero points": Int4Groups32Zeros,
}


def perplexity(prompts: Sequence[str], *, dtype: str, quantization: str | None) -> tuple[float, int]:
    """Of the demo model over `prompts`, and the number of tokens that were predicted."""
    settings: dict[str, object] = {"dtype": dtype, "quantization": quantization, "kv_cache_memory_bytes": 1 << 26}
    with LLM("demo", use_tqdm_on_load=False, **settings) as llm:
        outputs = llm.generate(list(prompts), SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    total, count = 0.0, 0
    for output in outputs:
        assert output.prompt_logprobs is not None and output.prompt_token_ids is not None
        for token, entries in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
            assert entries is not None
            total -= entries[token].logprob
            count += 1
    return math.exp(total / count), count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=100)
    parser.add_argument("--dtype", default="bfloat16", help="of the quantized rows")
    parser.add_argument("--only", nargs="*", help="rows whose name begins so")
    args = parser.parse_args()
    prompts = [text for text in corpus.documents("heldout", args.documents) if len(text) < 3000]
    for name, method in VARIANTS.items():
        registry._METHODS[name] = f"{method.__module__}:{method.__name__}"
    rows: list[tuple[str, str, str | None]] = [("float32", "float32", None), ("bfloat16", "bfloat16", None)]
    rows += [(name, args.dtype, name) for name in ("int8", "int4", *VARIANTS)]
    baseline, _ = perplexity(prompts, dtype="float32", quantization=None)
    print(f"{'weights':40}{'perplexity':>12}{'beside float32':>16}")
    for name, dtype, quantization in rows:
        if args.only and not name.startswith(tuple(args.only)):
            continue
        found, count = perplexity(prompts, dtype=dtype, quantization=quantization)
        print(f"{name:40}{found:12.4f}{found / baseline - 1:+16.2%}", flush=True)
    print(f"{count} tokens of {len(prompts)} held-out documents")


if __name__ == "__main__":
    main()

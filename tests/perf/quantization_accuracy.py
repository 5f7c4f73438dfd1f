"""Accuracy of quantization methods: the demo model's perplexity on held-out text, in one table.

    python -m tests.perf.quantization_accuracy [--documents 100] [--dtype bfloat16] [--only int8 int4]

Each row uses its own engine. The prompts are documents that the model was not trained on; the perplexity is exp of the
negative mean log-probability of their tokens. Besides the methods of the setting `quantization`, the table has formats
that were evaluated and not chosen; these exist only in this script.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from ci.demo_model import corpus
from mvllm import LLM, SamplingParams
from mvllm.layers.quantization import registry
from mvllm.layers.quantization.interface import IntegerFormat
from mvllm.layers.quantization.online_quantization import OnlineQuantization

FORMATS: dict[str, IntegerFormat] = {
    "int8, activations not quantized": IntegerFormat(8),
    "int4, activations not quantized": IntegerFormat(4, 32, symmetric=False),
    "int4, a scale per row": IntegerFormat(4, None, int8_activations=True),
    "int4, groups of 128": IntegerFormat(4, 128, int8_activations=True),
    "int4, groups of 128, zero points": IntegerFormat(4, 128, symmetric=False, int8_activations=True),
    "int4, groups of 64": IntegerFormat(4, 64, int8_activations=True),
    "int4, groups of 64, zero points": IntegerFormat(4, 64, symmetric=False, int8_activations=True),
    "int4, groups of 32": IntegerFormat(4, 32, int8_activations=True),
}
"""Formats to measure in addition to `int8` and `int4`, by the name of their row."""


def make_quantization_method(format: IntegerFormat) -> type[OnlineQuantization]:
    """A quantization method that quantizes the weights to `format` while loading."""
    return type("Variant", (OnlineQuantization,), {"format": format})


def perplexity(prompts: Sequence[str], *, dtype: str, quantization: str | None) -> tuple[float, int]:
    """The demo model's perplexity on `prompts`, and the number of predicted tokens."""
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
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the rows with quantization")
    parser.add_argument("--only", nargs="*", help="print only rows whose names start with one of these")
    args = parser.parse_args()
    prompts = [text for text in corpus.documents("heldout", args.documents) if len(text) < 3000]
    for i, (name, format) in enumerate(FORMATS.items()):
        globals()[f"Variant{i}"] = make_quantization_method(format)
        registry._METHODS[name] = f"{__name__}:Variant{i}"
    rows: list[tuple[str, str, str | None]] = [("float32", "float32", None), ("bfloat16", "bfloat16", None)]
    rows += [(name, args.dtype, name) for name in ("int8", "int4", *FORMATS)]
    baseline, _ = perplexity(prompts, dtype="float32", quantization=None)
    print(f"{'weights':40}{'perplexity':>12}{'vs. float32':>16}")
    for name, dtype, quantization in rows:
        if args.only and not name.startswith(tuple(args.only)):
            continue
        found, count = perplexity(prompts, dtype=dtype, quantization=quantization)
        print(f"{name:40}{found:12.4f}{found / baseline - 1:+16.2%}", flush=True)
    print(f"{count} tokens of {len(prompts)} held-out documents")


if __name__ == "__main__":
    main()

"""KV caches that store keys and values with fewer bits than the compute dtype."""

from __future__ import annotations

import pytest

from ci.demo_model import corpus
from mvllm import LLM, SamplingParams

TEXTS = list(corpus.documents("heldout", 12))
PARAMS = SamplingParams(max_tokens=6, temperature=0, prompt_logprobs=0)


def run(**settings) -> tuple[float, list[list[int]], int]:
    """Mean loss of the texts, greedy tokens after them, and KV cache bytes per token."""
    with LLM("demo", kv_cache_memory_bytes=1 << 24, max_num_seqs=16, max_num_batched_tokens=64, **settings) as llm:
        outputs = llm.generate(TEXTS, PARAMS, use_tqdm=False)
        summary = llm.llm_engine.cache_summary
    losses = [
        -entry[token].logprob
        for output in outputs
        for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    ]
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return sum(losses) / len(losses), tokens, summary.total_bytes // summary.num_tokens


@pytest.fixture(scope="module")
def exact():
    return run(dtype="float32")


@pytest.mark.parametrize("kernels", ["1", "0"], ids=["kernels", "torch"])
@pytest.mark.parametrize(("kv_dtype", "allowed"), [("int8", 0.002), ("fp8", 0.02)])
def test_8_bit_caches_take_a_quarter_of_the_memory_and_hardly_increase_the_loss(
    exact, monkeypatch, kernels, kv_dtype, allowed
):
    monkeypatch.setenv("MVLLM_CPU_KERNELS", kernels)
    loss, tokens, size = run(dtype="float32", kv_cache_dtype=kv_dtype)
    assert 0 < abs(loss - exact[0]) < allowed, "close, but not the cache of float32"
    same = [mine == theirs for mine, theirs in zip(tokens, exact[1])]
    assert sum(same) >= len(same) - 2  # near ties
    assert size < 0.3 * exact[2]

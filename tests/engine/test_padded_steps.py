"""A platform with a ShapePolicy gets only bucket sizes, and the tokens equal those of unpadded steps."""

from __future__ import annotations

import pytest

from mvllm import ConfigError, SamplingParams
from mvllm.platform.interface import Platform
from mvllm.platform.shapes import ShapePolicy
from mvllm.worker.step_inputs import StepInputBuilder
from tests.engine.conftest import MakeLLM

BUCKETS = ShapePolicy(tokens=(4, 24, 64), requests=(3, 16), pages=(1, 3, 40))
PROMPTS = [[7, 8, 9], list(range(20, 60)), [5], list(range(100, 117)), [3, 4]]


def generate(make_llm: MakeLLM) -> list[list[int]]:
    llm = make_llm(max_num_batched_tokens=40, kv_cache_memory_bytes=None, memory_utilization=0.3)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False, prompt_logprobs=1)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture
def buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Platform, "shapes", lambda self: BUCKETS)


def test_tokens_are_the_same(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    free = generate(make_llm)
    monkeypatch.setattr(Platform, "shapes", lambda self: BUCKETS)
    assert generate(make_llm) == free


def test_every_step_has_sizes_among_the_buckets(
    make_llm: MakeLLM, buckets: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, set[int]] = {"tokens": set(), "requests": set(), "pages": set(), "logits": set()}
    build = StepInputBuilder.build

    def watched_build(self, plan):
        inputs = build(self, plan)
        seen["tokens"] |= {inputs.layout.num_tokens, len(inputs.token_ids), len(inputs.positions)}
        seen["requests"] |= {inputs.layout.num_requests, len(inputs.layout.seq_lens_device)}
        seen["pages"].add(inputs.layout.block_table_device.shape[1])
        seen["logits"].add(len(inputs.logits_indices))
        return inputs

    monkeypatch.setattr(StepInputBuilder, "build", watched_build)
    generate(make_llm)
    assert BUCKETS.tokens and BUCKETS.requests and BUCKETS.pages
    assert seen["tokens"] <= set(BUCKETS.tokens) and len(seen["tokens"]) > 1
    assert seen["requests"] <= set(BUCKETS.requests)
    assert seen["pages"] <= set(BUCKETS.pages)
    assert seen["logits"] <= {0, *BUCKETS.requests}


@pytest.mark.parametrize(
    ("shapes", "limit"),
    [
        (ShapePolicy(tokens=(8, 16)), "max_num_batched_tokens is 40.*largest bucket for tokens is 16"),
        (ShapePolicy(requests=(8,)), "max_num_seqs is 16.*largest bucket for requests is 8"),
        (ShapePolicy(pages=(10,)), "max_model_len in blocks is 11.*largest bucket for pages is 10"),
        (ShapePolicy(tokens=()), "max_num_batched_tokens is 40.* is none"),
    ],
)
def test_limits_beyond_the_largest_bucket_are_rejected(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, shapes: ShapePolicy, limit: str
) -> None:
    monkeypatch.setattr(Platform, "shapes", lambda self: shapes)
    with pytest.raises(ConfigError, match=limit):
        make_llm(max_num_batched_tokens=40)

"""A platform with a ShapePolicy gets only bucket sizes, and the tokens equal those of unpadded steps."""

from __future__ import annotations

from typing import Any

import pytest

from mvllm import ConfigError, SamplingParams
from mvllm.platform.interface import Platform
from mvllm.platform.shapes import ShapePolicy
from mvllm.worker.step_inputs import StepInputBuilder
from tests.engine.conftest import MakeLLM
from tests.engine.test_mtp import mtp, reference
from tests.engine.test_speculative import acceptance

BUCKETS = ShapePolicy(tokens=(4, 24, 64), requests=(3, 16), pages=(1, 3, 40))
PROMPTS = [[7, 8, 9], list(range(20, 60)), [5], list(range(100, 117)), [3, 4]]


def drafts_of_a_module() -> dict[str, Any]:
    return {"model": reference("mimo", "near").folder, **mtp(3)}


def generate(make_llm: MakeLLM, **settings: Any) -> tuple[list[list[int]], tuple[int, int]]:
    """The tokens, and the numbers of draft tokens and of accepted ones."""
    llm = make_llm(max_num_batched_tokens=40, kv_cache_memory_bytes=None, memory_utilization=0.3, **settings)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False, prompt_logprobs=1)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs], acceptance(llm)


@pytest.fixture
def buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Platform, "shapes", lambda self: BUCKETS)


@pytest.mark.parametrize("with_drafts", [False, True])
def test_tokens_and_accepted_drafts_are_the_same(
    make_llm: MakeLLM, with_drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = drafts_of_a_module() if with_drafts else {}
    free = generate(make_llm, **settings)
    monkeypatch.setattr(Platform, "shapes", lambda self: BUCKETS)
    assert generate(make_llm, **settings) == free
    assert (free[1][1] > 0) == with_drafts


@pytest.mark.parametrize("with_drafts", [False, True])
def test_every_step_has_sizes_among_the_buckets(
    make_llm: MakeLLM, with_drafts: bool, buckets: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a module of the checkpoint, too, which computes the known tokens of a step in front of its drafts."""
    seen: dict[str, set[int]] = {"tokens": set(), "requests": set(), "pages": set(), "logits": set()}
    build = StepInputBuilder.build_rows

    def watched_build(*args, **others):
        inputs = build(*args, **others)
        seen["tokens"] |= {inputs.layout.num_tokens, len(inputs.token_ids), len(inputs.positions)}
        seen["requests"] |= {inputs.layout.num_requests, len(inputs.layout.seq_lens_device)}
        seen["pages"].add(inputs.layout.block_table_device.shape[1])
        if not inputs.num_draft_tokens.any():  # each draft token adds a row of logits
            seen["logits"].add(len(inputs.logits_indices))
        return inputs

    monkeypatch.setattr(StepInputBuilder, "build_rows", watched_build)
    generate(make_llm, **(drafts_of_a_module() if with_drafts else {}))
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

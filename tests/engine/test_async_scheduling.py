"""Planning a step while the previous one runs changes no token, for all sampling settings and under preemption."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from mvllm import RequestOutput, SamplingParams
from tests.engine.conftest import MakeLLM
from tests.helpers.model_zoo import EOS_TOKEN_ID, VOCAB_SIZE
from tests.helpers.parity import engine

BLOCK_BYTES = 16 * 3 * 2 * 2 * 16 * 4  # tokens, layers, key and value, heads, head size, float32
TIGHT = {"kv_cache_memory_bytes": 12 * BLOCK_BYTES}


def requests(seed: int) -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    """Prompts that share prefixes, with every kind of setting that depends on the generated tokens."""
    rng = random.Random(seed)
    shared = [rng.randrange(2, VOCAB_SIZE) for _ in range(100)]
    prompts, params = [], []
    for i, length in enumerate((1, 15, 16, 17, 33, 48, 90, 64, 3, 40, 90, 20, 31, 48)):
        own = rng.randrange(1, length + 1)
        ids = shared[: length - own] + [rng.randrange(2, VOCAB_SIZE) for _ in range(own)]
        prompts.append({"prompt_token_ids": ids})
        kinds: list[dict[str, Any]] = [
            {"temperature": 0, "max_tokens": None, "ignore_eos": True},
            {"temperature": 0, "max_tokens": 1},
            {"stop": list("aeiou"), "seed": i},
            {"stop_token_ids": list(range(0, VOCAB_SIZE, 9)), "min_tokens": 6, "seed": i},
            {"n": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "seed": i},
            {"logprobs": 2, "prompt_logprobs": 1, "top_k": 20, "seed": i},
            {"top_p": 0.9, "min_p": 0.02, "seed": i},
        ]
        params.append(SamplingParams(**({"max_tokens": 40} | kinds[i % len(kinds)])))
    return prompts, params


def visible_outputs(output: RequestOutput) -> list[tuple[object, ...]]:
    """The caller's view of a request without the exact log-probabilities, which depend on the batch."""
    return [
        (list(c.token_ids), c.text, c.finish_reason, c.stop_reason, [set(p) for p in c.logprobs or ()])
        for c in output.outputs
    ]


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[tuple[object, ...]]]:
    """Outputs of the requests without asynchronous scheduling."""
    with engine(checkpoint) as llm:
        return [visible_outputs(output) for output in llm.generate(*requests(seed=5), use_tqdm=False)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 17},
        {"max_num_seqs": 1, "max_num_batched_tokens": 16},
        TIGHT,
        {**TIGHT, "enable_chunked_prefill": False},
        {**TIGHT, "enable_prefix_caching": False, "scheduling_policy": "priority"},
    ],
)
def test_async_scheduling_changes_no_token(
    make_llm: MakeLLM, settings: dict[str, Any], expected: list[list[tuple[object, ...]]]
) -> None:
    prompts, params = requests(seed=5)
    llm = make_llm(async_scheduling=True, **settings)
    for _ in range(2):  # the second time with prefixes in the cache
        assert [visible_outputs(output) for output in llm.generate(prompts, params, use_tqdm=False)] == expected
    stats = llm.llm_engine.stats
    assert stats is not None and (stats.num_preemptions > 0) == ("kv_cache_memory_bytes" in settings)


def test_a_request_that_ends_while_its_next_step_runs_leaves_no_state(make_llm: MakeLLM) -> None:
    llm = make_llm(async_scheduling=True)
    prompt = {"prompt_token_ids": [7, 8, 9]}
    token = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)[0].outputs[0].token_ids[0]
    assert token != EOS_TOKEN_ID
    stopping = SamplingParams(temperature=0, stop_token_ids=[token])
    output = llm.generate(prompt, stopping, use_tqdm=False)[0].outputs[0]
    assert (list(output.token_ids), output.finish_reason, output.stop_reason) == ([token], "stop", token)

    engine = llm.llm_engine
    engine.add_request("dropped", prompt, SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    engine.step()
    engine.abort_request("dropped")
    assert not engine.has_unfinished_requests()
    # The row and the blocks now belong to another request; the step in flight must not write to them.
    after = llm.generate({"prompt_token_ids": [30] * 20}, SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)
    fresh = make_llm().generate(
        {"prompt_token_ids": [30] * 20}, SamplingParams(temperature=0, max_tokens=9), use_tqdm=False
    )
    assert after[0].outputs[0].token_ids == fresh[0].outputs[0].token_ids
    assert engine.stats is not None and engine.stats.kv_cache_usage == 0

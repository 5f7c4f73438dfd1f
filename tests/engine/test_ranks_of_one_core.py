"""One engine core and several ranks give the tokens and log-probabilities of one rank, for all request settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from mvllm import LLM, SamplingParams
from tests.engine.conftest import MakeLLM
from tests.helpers.parity import engine
from tests.helpers.thread_executor import ThreadExecutor

PROMPTS = [{"prompt_token_ids": [2 + (i * k + k) % 300 for i in range(1 + 9 * (k % 6))]} for k in range(1, 11)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=45, ignore_eos=True, logprobs=2, detokenize=False),
    SamplingParams(temperature=1.2, top_p=0.9, seed=3, max_tokens=42, ignore_eos=True, detokenize=False),
    SamplingParams(temperature=0.8, seed=4, max_tokens=9, prompt_logprobs=1, repetition_penalty=1.3, detokenize=False),
    SamplingParams(temperature=0, max_tokens=30, min_tokens=8, stop_token_ids=[7, 8, 9], detokenize=False),
    SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=32, ignore_eos=True, detokenize=False),
]
LAYOUTS = [(2, 1), (1, 2), (1, 3), (2, 2), (4, 1)]
REPEATED = [(1, 2), (4, 1)]
"""Layouts that the others cover; the exhaustive tests have them."""
BYTES_PER_TOKEN = 768  # of llama-gqa in one rank: 3 layers, keys and values, 2 heads of 16, float32


def several(make_llm: MakeLLM, tp: int, pp: int, **settings: object) -> LLM:
    return make_llm(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        distributed_executor_backend=f"{ThreadExecutor.__module__}.{ThreadExecutor.__name__}",
        **settings,
    )


def generate(llm: LLM) -> list[tuple]:
    params = [PARAMS[i % len(PARAMS)] for i in range(len(PROMPTS))]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [
        (
            [(list(sequence.token_ids), sequence.finish_reason) for sequence in output.outputs],
            [entry.logprob for e in output.outputs[0].logprobs or [] for entry in e.values()],
            [entry.logprob for e in output.prompt_logprobs or [] if e for entry in e.values()],
        )
        for output in outputs
    ]


def check_equal(found: list[tuple], expected: list[tuple]) -> None:
    for (tokens, logprobs, prompt_logprobs), (tokens0, logprobs0, prompt_logprobs0) in zip(
        found, expected, strict=True
    ):
        assert tokens == tokens0
        assert logprobs == pytest.approx(logprobs0, abs=1e-4)
        assert prompt_logprobs == pytest.approx(prompt_logprobs0, abs=1e-4)


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> list[tuple]:
    with engine(checkpoint) as llm:
        return generate(llm)


@pytest.mark.parametrize(
    ("tp", "pp", "async_scheduling"),
    [
        *((*layout, True) for layout in LAYOUTS if layout not in REPEATED),
        *(pytest.param(*layout, True, marks=pytest.mark.exhaustive) for layout in REPEATED),
        (2, 2, False),
        *(pytest.param(*layout, False, marks=pytest.mark.exhaustive) for layout in LAYOUTS if layout != (2, 2)),
    ],
)
def test_several_ranks_give_the_outputs_of_one(
    make_llm: MakeLLM, alone: list[tuple], tp: int, pp: int, async_scheduling: bool
) -> None:
    llm = several(make_llm, tp, pp, max_num_batched_tokens=24, async_scheduling=async_scheduling)
    check_equal(generate(llm), alone)
    check_equal(generate(llm), alone)  # with prefixes found in the cache


@pytest.mark.parametrize(
    ("tp", "pp"),
    [pytest.param(*layout, marks=pytest.mark.exhaustive if layout in REPEATED else ()) for layout in LAYOUTS],
)
def test_preempted_requests_give_the_outputs_of_one_rank(
    make_llm: MakeLLM, alone: list[tuple], tp: int, pp: int
) -> None:
    layers, heads = -(-3 // pp), max(1, 2 // tp)
    share = BYTES_PER_TOKEN * layers * heads // 6
    llm = several(make_llm, tp, pp, kv_cache_memory_bytes=11 * 16 * share)
    assert llm.llm_engine.cache_summary.num_blocks == 11
    check_equal(generate(llm), alone)
    stats = llm.llm_engine.stats
    assert stats is not None and stats.num_preemptions > 0


@pytest.mark.parametrize("pp", [2, 3])
def test_one_step_per_pipeline_stage_is_in_flight(make_llm: MakeLLM, pp: int) -> None:
    ThreadExecutor.max_in_flight = 0
    generate(several(make_llm, 1, pp))
    assert ThreadExecutor.max_in_flight == pp


def test_requests_that_end_early_leave_the_pipeline_in_order(make_llm: MakeLLM) -> None:
    llm = several(make_llm, 1, 3)
    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, detokenize=False)
    expected = [o.outputs[0].token_ids for o in make_llm().generate(PROMPTS[:4], params, use_tqdm=False)]
    for i in range(4):
        engine.add_request(str(i), PROMPTS[i], params)
    found = {}
    for step in range(400):
        if step == 7:
            engine.abort_request(["1"])
        if step == 11:
            engine.abort_request(["3"])
            engine.add_request("again", PROMPTS[3], params)
        for output in engine.step():
            if output.finished:
                found[output.request_id] = list(output.outputs[0].token_ids)
        if not engine.has_unfinished_requests():
            break
    assert found == {"0": list(expected[0]), "2": list(expected[2]), "again": list(expected[3])}

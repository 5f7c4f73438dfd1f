"""Models with sequence states give the tokens of transformers in every mode of the engine."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

from mvllm import LLM
from tests.helpers import parity
from tests.helpers.parity import Oracle

NAME = "mamba2"
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


@pytest.fixture
def expected() -> Oracle:
    return parity.oracle(NAME)


def start(stack: ExitStack, expected: Oracle, **settings: Any) -> LLM:
    return stack.enter_context(parity.engine(expected.folder, **settings))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_steps_planned_ahead_give_the_same(stack: ExitStack, expected: Oracle, asynchronous: bool) -> None:
    llm = start(stack, expected, async_scheduling=asynchronous, max_num_seqs=5, max_num_batched_tokens=40)
    for _ in range(2):
        parity.check(expected, parity.generate(llm, expected.prompts))


def test_a_slot_that_held_another_state_starts_from_zeros(stack: ExitStack, expected: Oracle) -> None:
    llm = start(stack, expected, enable_prefix_caching=False, max_num_seqs=2)
    for which in ([11, 10], [0, 1], [6, 2]):
        parity.check(expected, parity.generate(llm, [expected.prompts[i] for i in which]), which)


def test_memory_that_held_other_numbers_starts_from_zeros(stack: ExitStack, expected: Oracle) -> None:
    llm = start(stack, expected)

    def fill(model: Any) -> None:
        for layer in model.state_layers():
            layer.backend.fill(layer.state, float("nan"))

    llm.apply_model(fill)
    parity.check(expected, parity.generate(llm, expected.prompts))


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_slept_gives_the_same(stack: ExitStack, expected: Oracle, level: int) -> None:
    llm = start(stack, expected)
    which = [3, 11]
    parity.check(expected, parity.generate(llm, [expected.prompts[i] for i in which]), which)
    layers = llm.apply_model(lambda model: model.state_layers())[0]
    assert layers and all(layer.state for layer in layers)
    llm.sleep(level)
    assert not any(layer.state for layer in layers)
    llm.wake_up()
    parity.check(expected, parity.generate(llm, [expected.prompts[i] for i in which]), which)


@pytest.mark.parametrize(
    ("tensor", "pipeline"), [(1, 2), pytest.param(2, 1, marks=pytest.mark.exhaustive)], ids=["pipeline", "tensor"]
)
@pytest.mark.exhaustive
def test_worker_processes_give_the_same(stack: ExitStack, expected: Oracle, tensor: int, pipeline: int) -> None:
    llm = start(
        stack, expected, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, distributed_executor_backend="mp"
    )
    parity.check(expected, parity.generate(llm, expected.prompts[:8]))


def test_rejected_draft_tokens_leave_no_trace_in_the_state(stack: ExitStack, expected: Oracle) -> None:
    llm = start(stack, expected, speculative_config=NGRAM, max_num_seqs=8)
    for _ in range(2):
        parity.check(expected, parity.generate(llm, expected.prompts))
    stats = llm.llm_engine.stats
    assert stats is not None
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens, "drafts were not both accepted and rejected"


def test_a_model_without_states_has_no_slots(stack: ExitStack) -> None:
    expected = parity.oracle("llama-gqa", which=(3,))
    llm = start(stack, expected)
    assert llm.llm_engine.cache_summary.num_state_slots == 0
    parity.check(expected, parity.generate(llm, expected.prompts))

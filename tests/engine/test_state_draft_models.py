"""Speculative decoding of models with sequence states, with draft models with and without states."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from mvllm import LLM, SamplingParams
from tests.engine.test_speculative import THREADS, acceptance, drafts, draw, run, tokens
from tests.helpers.parity import engine

ATTENTION, HYBRID, ONLY_STATE = "llama-gqa", "granitehybrid", "mamba2"
PROMPTS = [draw(random.Random(i), length) for i, length in enumerate((1, 15, 16, 17, 31, 32, 48, 100))]
PROMPTS += [[*PROMPTS[-1][:80], 7], PROMPTS[-1][:64], [5, 6, 7] * 20]


def speculative(draft: Path, count: int = 3) -> dict[str, Any]:
    return {"model": str(draft), "num_speculative_tokens": count, "adaptive": False}


def ngram(count: int = 3) -> dict[str, Any]:
    return {"method": "ngram", "num_speculative_tokens": count, "prompt_lookup_min": 1, "adaptive": False}


def check_integrity(llm: LLM) -> None:
    scheduler = llm.llm_engine._client._core.scheduler  # type: ignore[attr-defined]
    scheduler.check_integrity()
    assert scheduler.make_stats().kv_cache_usage == 0


def sampling(count: int = 20) -> list[SamplingParams]:
    """Greedy and random, seeded."""
    return [
        SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.8 * (i % 2), seed=i, detokenize=False)
        for i in range(len(PROMPTS))
    ]


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        pytest.param(ATTENTION, ONLY_STATE, marks=pytest.mark.exhaustive),
        pytest.param(HYBRID, ATTENTION, marks=pytest.mark.exhaustive),
        pytest.param(ONLY_STATE, HYBRID, marks=pytest.mark.exhaustive),
        pytest.param(HYBRID, ONLY_STATE, marks=pytest.mark.exhaustive),
        pytest.param(ONLY_STATE, ATTENTION, marks=pytest.mark.exhaustive),
        pytest.param("qwen3next", "lfm2", marks=pytest.mark.exhaustive),
        pytest.param("kimilinear", "qwen3next", marks=pytest.mark.exhaustive),
        pytest.param("lfm2moe", "mistral-window", marks=pytest.mark.exhaustive),
        pytest.param("mistral-window", "kimilinear", marks=pytest.mark.exhaustive),
        pytest.param("nemotronh", "falconh1", marks=pytest.mark.exhaustive),
    ],
)
def test_drafts_of_another_model_change_no_tokens(target: str, draft: str) -> None:
    folder, settings = drafts(target), {"state_snapshot_interval": 16}
    with engine(folder) as llm:
        expected = tokens(run(llm, PROMPTS, sampling()))
    with engine(folder, speculative_config=speculative(drafts(draft)), max_num_batched_tokens=40, **settings) as llm:
        for _ in range(2):  # the second time with prefixes in the cache
            assert tokens(run(llm, PROMPTS, sampling())) == expected
        guessed, right = acceptance(llm)
        assert 0 <= right < guessed
        check_integrity(llm)


@pytest.mark.parametrize(
    "name",
    [HYBRID, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (ONLY_STATE, "qwen3next", "kimilinear", "lfm2"))],
)
def test_all_drafts_of_the_target_model_are_accepted(name: str) -> None:
    """So the draft model's states are those of the tokens so far: from kept states, in chunks, and after preemption."""
    folder = drafts(name)
    settings: dict[str, Any] = {"max_num_batched_tokens": 40, "state_snapshot_interval": 16}
    with engine(folder, speculative_config=speculative(folder), **settings) as llm:
        summary = llm.llm_engine.cache_summary
        [needs] = llm.llm_engine._client._core._executor.kv_cache_needs()  # type: ignore[attr-defined]
        block = needs.bytes_per_token * summary.block_size
        run(llm, PROMPTS, sampling())
        again = run(llm, PROMPTS, sampling())
        guessed, right = acceptance(llm)
        assert guessed == right > 100
        assert sum(output.num_cached_tokens or 0 for output in again) > 100
    memory = needs.fixed_state_bytes + 9 * needs.state_bytes + 12 * block
    with engine(folder, speculative_config=speculative(folder), kv_cache_memory_bytes=memory, **settings) as llm:
        found = tokens(run(llm, PROMPTS, sampling(40)))
        assert [each[:20] for each in found] == tokens(again)
        stats = llm.llm_engine.stats
        guessed, right = acceptance(llm)
        assert stats is not None and guessed == right > 0
        assert name == ONLY_STATE or stats.num_preemptions > 0
        check_integrity(llm)


def test_a_stage_without_states_verifies_drafts() -> None:
    """The states of this model are all in the first stage."""
    folder = drafts("nemotronh")
    ranks = {"pipeline_parallel_size": 2, "distributed_executor_backend": THREADS}
    prompts, params = PROMPTS[-2:], sampling()[-2:]
    with engine(folder) as llm:
        expected = tokens(run(llm, prompts, params))
    with engine(folder, speculative_config=ngram(), **ranks) as llm:
        assert tokens(run(llm, prompts, params)) == expected
        assert acceptance(llm)[0] > 0


@torch.inference_mode()
def poison_free_slots(llm: LLM) -> None:
    """Overwrites the states of all slots that no request uses and that are no snapshots, and those of drafts."""
    core = llm.llm_engine._client._core  # type: ignore[attr-defined]
    pool = core.scheduler._kv_cache.states._pool
    kept = {*pool.cached_blocks(), *(slot for slot, count in enumerate(pool.ref_counts) if count)}
    layers = core._executor._worker._worker.runner._layers.states
    for layer in (*layers._layers, *layers._draft_layers):
        for tensor in layer.state:
            tensor[[slot for slot in range(len(tensor)) if slot not in kept]] = torch.nan


def run_poisoned(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], aborted: Collection[int] = ()
) -> dict[int, list[int]]:
    """Runs requests, preempts some, and overwrites the states of free slots after each step.

    Args:
        aborted: Requests that are aborted after a few steps.

    Returns:
        Their tokens by number.
    """
    core, found = llm.llm_engine, dict[int, list[int]]()
    scheduler = core._client._core.scheduler  # type: ignore[attr-defined]
    swapper = scheduler._planner._running_plan._blocks._swapper
    poison_free_slots(llm)
    for i, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        core.add_request(str(i), {"prompt_token_ids": prompt}, each)
    for number in itertools.count():
        if not core.has_unfinished_requests():
            return found
        if number == 9:
            core.abort_request([str(i) for i in aborted])
        for output in core.step():
            if output.finished:
                found[int(output.request_id)] = list(output.outputs[0].token_ids)
        if number % 7 == 6 and scheduler.requests.running:
            is_swapped = swapper is not None and swapper.swap_out(scheduler.requests.running[-1])
            scheduler.requests.preempt_last(is_swapped=is_swapped)
        poison_free_slots(llm)
    raise AssertionError("count() ends")


@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [
        (HYBRID, "near", {}),
        (HYBRID, "near", {"async_scheduling": True}),
        pytest.param(HYBRID, "ngram", {"kv_offloading_size": 0.05}, marks=pytest.mark.exhaustive),
        pytest.param(
            HYBRID, "near", {"kv_offloading_size": 0.05, "preemption_mode": "swap"}, marks=pytest.mark.exhaustive
        ),
        *(
            pytest.param(name, kind, {}, marks=pytest.mark.exhaustive)
            for name in (ONLY_STATE, "qwen3next", "kimilinear", "lfm2", "falconh1", "nemotronh", ATTENTION)
            for kind in ("near", "state", "ngram")
            if (name != ATTENTION or kind == "state") and (name, kind) != ("lfm2", "ngram")  # its text repeats nothing
        ),
    ],
    ids=str,
)
def test_no_step_reads_a_state_that_is_not_its_own(name: str, kind: str, settings: dict[str, Any]) -> None:
    """Prefix hits that end 0 to 16 tokens behind a block, in chunks, with preemption and aborts.

    A read of the state behind a rejected draft token, of an earlier step, or of another request gives NaN.
    """
    rng, folder = random.Random(1), drafts(name)
    shared, lengths = draw(rng, 100), range(17) if settings or name != HYBRID else (0, 1, 7, 15, 16)
    prompts = [[*shared[: 32 + length], *draw(rng, 1 + length % 3)] for length in lengths] + [[5, 6, 7] * 15]
    params = [
        SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8 * (i % 2), seed=i, detokenize=False)
        for i in range(len(prompts))
    ]
    with engine(folder, enable_prefix_caching=False) as llm:
        expected = dict(enumerate(tokens(run(llm, prompts, params))))
    draft = {"near": drafts(name, noise=0.05), "state": drafts(ONLY_STATE, seed=3)}.get(kind)
    settings = {
        "speculative_config": ngram(4) if draft is None else speculative(draft, 4),
        "state_snapshot_interval": 16,
        "max_num_batched_tokens": 40,
        **settings,
    }
    with engine(folder, **settings) as llm:
        assert run_poisoned(llm, prompts, params) == expected
        again = run_poisoned(llm, prompts, params, aborted=range(0, len(prompts), 3))
        assert len(again) < len(expected) and again == {i: expected[i] for i in again}
        stats = llm.llm_engine.stats
        assert stats is not None and 0 < stats.num_accepted_tokens < stats.num_draft_tokens
        assert stats.prefix_cache_hits > 0
        check_integrity(llm)


@pytest.mark.parametrize("count", [4, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_nearly_equal_drafts_are_accepted_and_rejected(count: int) -> None:
    folder, near = drafts(HYBRID), drafts(HYBRID, noise=0.05)
    with engine(folder) as llm:
        expected = tokens(run(llm, PROMPTS[4:], sampling(30)[4:]))
    with engine(folder, speculative_config=speculative(near, count), state_snapshot_interval=16) as llm:
        for _ in range(2):
            assert tokens(run(llm, PROMPTS[4:], sampling(30)[4:])) == expected
        guessed, right = acceptance(llm)
        assert guessed / 4 < right < guessed
        check_integrity(llm)


@pytest.mark.parametrize(
    ("name", "ranks", "kind"),
    [
        (HYBRID, (1, 2), "model"),
        pytest.param(HYBRID, (2, 1), "model", marks=pytest.mark.exhaustive),
        pytest.param(ONLY_STATE, (2, 2), "model", marks=pytest.mark.exhaustive),
        (HYBRID, (2, 1), "ngram"),
        pytest.param(HYBRID, (1, 2), "ngram", marks=pytest.mark.exhaustive),
        pytest.param("qwen3next", (2, 2), "ngram", marks=pytest.mark.exhaustive),
        pytest.param("qwen3next", (2, 1), "model", marks=pytest.mark.exhaustive),
        pytest.param(ATTENTION, (1, 2), "mamba2", marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_several_ranks_give_the_same(name: str, ranks: tuple[int, int], kind: str) -> None:
    folder = drafts(name)
    draft = {"model": folder, "mamba2": drafts("mamba2")}.get(kind)
    settings = {
        "tensor_parallel_size": ranks[0],
        "pipeline_parallel_size": ranks[1],
        "distributed_executor_backend": THREADS,
        "speculative_config": ngram() if draft is None else speculative(draft),
        "state_snapshot_interval": 16,
        "max_num_batched_tokens": 40,
    }
    greedy = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    with engine(folder) as llm:
        expected = tokens(run(llm, PROMPTS, greedy))
    with engine(folder, **settings) as llm:
        for _ in range(2):
            assert tokens(run(llm, PROMPTS, greedy)) == expected
        guessed, right = acceptance(llm)
        assert guessed == right > 0 if kind == "model" else guessed > 0
        check_integrity(llm)


def test_an_engine_that_slept_drafts_as_before() -> None:
    folder = drafts(ONLY_STATE)
    greedy = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    with engine(folder, speculative_config=speculative(folder)) as llm:
        expected = tokens(run(llm, PROMPTS[-3:], greedy))
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert tokens(run(llm, PROMPTS[-3:], greedy)) == expected
        guessed, right = acceptance(llm)
        assert guessed == right > 0


@pytest.mark.parametrize("name", [ATTENTION, ONLY_STATE])
def test_running_requests_go_on_when_the_models_are_compiled_anew(name: str) -> None:
    """As after an update of the weights that has moved them."""
    folder = drafts(name)
    with engine(folder, speculative_config=speculative(folder), max_num_batched_tokens=40) as llm:
        for i, prompt in enumerate(PROMPTS[-4:]):
            params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
            llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
        for _ in range(12):
            llm.llm_engine.step()
        llm.llm_engine._client._core._executor._worker._worker.runner.drop_captured_steps()  # type: ignore[attr-defined]
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
        guessed, right = acceptance(llm)
        assert guessed == right > 0


def test_the_states_of_a_draft_model_are_part_of_the_memory() -> None:
    folder = drafts(ONLY_STATE)
    with engine(drafts(ATTENTION), speculative_config=speculative(folder), max_num_seqs=3) as llm:
        [needs] = llm.llm_engine._client._core._executor.kv_cache_needs()  # type: ignore[attr-defined]
        runner = llm.llm_engine._client._core._executor._worker._worker.runner  # type: ignore[attr-defined]
        layers = runner.loader.draft.model.state_layers()
        num_slots = llm.llm_engine.cache_summary.num_state_slots
        held = sum(tensor.nbytes for layer in layers for tensor in layer.state)
        assert held == num_slots * needs.state_bytes + needs.fixed_state_bytes
        assert {len(tensor) for layer in layers for tensor in layer.state} == {num_slots + 3 + 1}
        assert llm.llm_engine.cache_summary.total_bytes <= 2**24


def test_a_given_memory_holds_all_states() -> None:
    with engine(drafts(ONLY_STATE), kv_cache_memory_bytes=2**20) as llm:
        layers = llm.apply_model(lambda model: model.state_layers())[0]
        slot = sum(layer.backend.bytes_per_sequence() for layer in layers)
        assert 2**20 - slot < sum(tensor.nbytes for layer in layers for tensor in layer.state) <= 2**20

"""Prompts with images, with a host tier: blocks are found for the same image only, and tokens are equal."""

from __future__ import annotations

from typing import Any

import pytest

from mvllm import LLM
from mvllm.messages.requests import SchedulerStats
from tests.helpers.multimodal_suite import (
    BLOCK_SIZE,
    NUM_TOKENS,
    MultiModalOracle,
    check,
    engine,
    generate,
    oracle,
)

FAMILIES = ("llava", "qwen2_5_vl", "gemma3-images", "lfm2_vl")
"""Causal images, rotary positions in three dimensions, images that attend both ways, sequence states."""
NUM_IMAGES = 4
"""Different images of all requests of an oracle."""


def stats(llm: LLM) -> SchedulerStats:
    """Counters of the engine core in this process, with the sizes of its tiers as of now."""
    core = llm.llm_engine._client._core  # type: ignore[attr-defined]
    if core.scheduler.kv_loads is not None:
        core.scheduler.kv_loads._stats_time = float("-inf")
    made: SchedulerStats = core.make_stats()
    return made


def num_encoded(llm: LLM) -> int:
    """Items whose encoder has run."""
    found = stats(llm)
    return found.encoder_cache_queries - found.encoder_cache_hits


def check_encoder_runs(expected: MultiModalOracle, llm: LLM, index: int, hit: int, before: int) -> None:
    """The encoder of a request's image has run once if the hit ends before the end of the image, and not otherwise."""
    _, stop = expected.span_of_image(index)
    assert num_encoded(llm) - before == (hit < stop), f"request {index}, {hit} cached tokens, image up to {stop}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["swap", "auto", "recompute"])
@pytest.mark.parametrize("name", FAMILIES)
def test_preempted_requests_go_on_without_their_encoders(name: str, mode: str) -> None:
    """Small steps: layers with a window reserve the blocks of a step when a request starts, so that it can grow only in
    the other layers."""
    expected = oracle(name)
    lengths = [len(expected.prompt_ids(request)) for request in expected.requests]
    settings: dict[str, Any] = {
        "max_model_len": max(lengths) + NUM_TOKENS,
        "max_num_batched_tokens": 32 if expected.config.has_non_causal_spans else 64,
    }
    if expected.entry.has_states:
        settings["state_snapshot_interval"] = BLOCK_SIZE
    with engine(expected.folder, **settings) as llm:
        core = llm.llm_engine._client._core  # type: ignore[attr-defined]
        needs, summary = core._executor.kv_cache_needs(), core.cache_summary
    for extra in (10, 8, 6, 4, 2):
        blocks = summary.blocks_per_request + extra
        memory = summary.total_bytes // summary.num_blocks * blocks
        if summary.num_state_slots:
            memory = max(
                need.fixed_state_bytes + 6 * need.state_bytes + blocks * need.bytes_per_token * summary.block_size
                for need in needs
            )
        with engine(
            expected.folder,
            kv_cache_memory_bytes=memory,
            kv_offloading_size=0.05,
            preemption_mode=mode,
            **settings,
        ) as llm:
            check(expected, generate(llm, expected.requests))
            after = stats(llm)
            assert after.num_swapped == 0
            assert num_encoded(llm) == NUM_IMAGES  # no image is encoded again, as the encoder cache has room for all
        if after.num_preemptions:
            assert mode != "swap" or after.kv_tiers["host"].num_loaded > 0
            return
    raise AssertionError("no request was preempted")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FAMILIES)
def test_host_memory_keeps_images_through_sleep(name: str) -> None:
    expected = oracle(name)
    settings = {"state_snapshot_interval": BLOCK_SIZE} if expected.entry.has_states else {}
    with engine(expected.folder, kv_offloading_size=0.05, **settings) as llm:
        for level in (None, 1, 2):
            if level is not None:
                llm.sleep(level)
                llm.wake_up()
            for index in (1, 7):
                before = num_encoded(llm)
                (output,) = generate(llm, [expected.requests[index]])
                check(expected, [output], [index])
                if level is not None:
                    assert output.num_cached_tokens
                    check_encoder_runs(expected, llm, index, output.num_cached_tokens, before)
        assert llm.reset_prefix_cache()
        before = num_encoded(llm)
        (output,) = generate(llm, [expected.requests[1]])
        assert output.num_cached_tokens == 0 and num_encoded(llm) == before + 1

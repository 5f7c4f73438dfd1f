"""Grouping of layers with different windows, and the resulting KV cache size."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mvllm.config.engine_config import CacheConfig, SchedulerConfig
from mvllm.engine.core.kv_cache_groups import bytes_per_block, choose_group_windows, layers_per_block
from mvllm.engine.core.kv_cache_sizing import size_kv_cache
from mvllm.errors import CacheError
from mvllm.platform.worker_protocol import KVCacheNeeds
from mvllm.worker.kv_cache_groups import assign_layers_to_groups
from tests.unit.engine.builders import make_config

PER_LAYER = 100


def needs(*windows: int | None) -> KVCacheNeeds:
    return KVCacheNeeds(PER_LAYER * len(windows), (16,), windows)


GEMMA = [None if i % 6 == 5 else 512 for i in range(26)]


@pytest.mark.parametrize(
    ("windows", "groups"),
    [
        ([None] * 4, (None,)),
        ([], (None,)),
        ([64] * 4, (64,)),
        ([64, None] * 6, (None, 64)),
        ([9, None, 9], (None, 9, 9)),
        (GEMMA, (None, *[512] * 6)),
        ([2000] * 4, (None,)),  # the length of the longest sequence
        ([2000, 64] * 2, (None, 64)),
        ([64, 32] * 2, (64, 32)),
    ],
)
def test_groups_are_few_and_about_equally_large(windows, groups):
    assert choose_group_windows([needs(*windows)], 2000) == groups


def test_one_worker_without_windows_disables_groups_for_all():
    assert choose_group_windows([needs(64, None), KVCacheNeeds(200, (16,))], 2000) == (None,)


def test_stages_of_a_pipeline_have_the_same_groups():
    stages = [needs(9, None), needs(9)]
    assert choose_group_windows(stages, 2000) == (None, 9)
    assert [bytes_per_block(stage, (None, 9), 2000, 16) for stage in stages] == [1600, 1600]


kinds = st.lists(st.sampled_from([None, 5, 7, 64]), min_size=1, max_size=40)


@given(st.lists(kinds, min_size=1, max_size=3))
def test_layers_of_a_group_have_different_cache_tensors(stages):
    groups = choose_group_windows([needs(*stage) for stage in stages], 2000)
    for stage in stages:
        places = assign_layers_to_groups(stage, groups, 2000)
        assert len(set(places)) == len(stage)
        if len(groups) > 1:
            assert all(groups[group] == window for (group, _), window in zip(places, stage, strict=True))
        assert max(place for _, place in places) < layers_per_block(needs(*stage), groups, 2000)
    if len(stages) == 1 and len(groups) > 1:
        filled = len(stages[0])
        assert len(groups) * layers_per_block(needs(*stages[0]), groups, 2000) <= filled * 9 / 8
        assert set(Counter(groups)) == set(stages[0])


def settings(max_model_len=160, max_num_seqs=4, step=32, **cache):
    scheduler = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=step)
    cache = CacheConfig(**{"memory_utilization": 0.9, **cache})
    return replace(make_config(max_model_len=max_model_len), scheduler=scheduler, cache=cache)


BLOCK = 16 * PER_LAYER


def test_layers_that_all_have_windows_serve_more_requests_with_the_same_memory():
    full = size_kv_cache(settings(), [needs(None, None)], [20 * 2 * BLOCK])
    windowed = size_kv_cache(settings(), [needs(17, 17)], [20 * 2 * BLOCK])
    assert full.num_blocks == windowed.num_blocks == 20
    assert (full.blocks_per_request, windowed.blocks_per_request) == (
        10,
        4,
    )  # 16 tokens of the window, and a step of 32
    assert (full.max_concurrency, windowed.max_concurrency) == (2.0, 5.0)
    assert (full.num_tokens, windowed.num_tokens) == (320, 800)
    assert "800 tokens (20 blocks of 16" in str(windowed) and "5.0 concurrent requests of 160" in str(windowed)


def test_a_request_allocates_blocks_in_every_group():
    summary = size_kv_cache(settings(), [needs(17, None, 17)], [28 * BLOCK])
    assert summary.windows == (None, 17, 17)
    assert (summary.num_blocks, summary.blocks_per_request) == (28, 10 + 4 + 4)
    assert summary.total_bytes == 28 * BLOCK
    assert summary.num_tokens == 28 * 160 // 18


def test_too_few_blocks_for_the_longest_sequence_is_an_error_with_the_needed_size():
    assert size_kv_cache(settings(), [needs(17, None)], [14 * BLOCK]).num_blocks == 14
    with pytest.raises(CacheError, match="set max_model_len to 144 or less") as caught:
        size_kv_cache(settings(kv_cache_memory_bytes=14 * BLOCK - 1), [needs(17, None)], [14 * BLOCK - 1])
    assert f"raise kv_cache_memory_bytes to {14 * BLOCK}" in str(caught.value)
    assert size_kv_cache(settings(max_model_len=144), [needs(17, None)], [14 * BLOCK - 1]).num_blocks == 13


def test_without_prefix_caching_no_more_memory_is_claimed_than_all_sequences_could_write():
    without = settings(enable_prefix_caching=False)
    assert size_kv_cache(without, [needs(17)], [10**9]).num_blocks == 4 * 10
    assert size_kv_cache(without, [needs(17, None)], [10**9]).num_blocks == 2 * 4 * 10

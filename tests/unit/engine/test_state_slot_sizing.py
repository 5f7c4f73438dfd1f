"""State slots and KV blocks share one budget."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mvllm.config.draft_method import SpeculativeConfig
from mvllm.engine.core.kv_cache_sizing import max_blocks_of_sequence, size_kv_cache
from mvllm.errors import CacheError
from mvllm.platform.worker_protocol import KVCacheNeeds
from tests.unit.engine.test_kv_cache_sizing import config

HYBRID = KVCacheNeeds(bytes_per_token=100, block_sizes=(16,), state_bytes=50_000)
ONLY_STATE = KVCacheNeeds(bytes_per_token=0, block_sizes=(16,), state_bytes=50_000)
BLOCK = 16 * 100


def test_half_of_the_budget_is_for_working_slots_at_most():
    summary = size_kv_cache(config(max_num_seqs=1000), [HYBRID], [20_000_000])
    # 200 working slots; the rest in the ratio of one snapshot per 512 tokens
    num_snapshots = 10_000_000 // (50_000 + 512 * 100)
    assert summary.num_state_slots == 200 + num_snapshots
    assert summary.num_blocks == (10_000_000 - num_snapshots * 50_000) // BLOCK


def test_a_few_sequences_get_a_working_slot_each_and_the_rest_is_for_prefixes():
    summary = size_kv_cache(config(max_num_seqs=4), [HYBRID], [20_000_000])
    num_snapshots = (20_000_000 - 4 * 50_000) // (50_000 + 512 * 100)
    assert summary.num_state_slots == 4 + num_snapshots
    sparse = size_kv_cache(config(max_num_seqs=4, state_snapshot_interval=4096), [HYBRID], [20_000_000])
    assert sparse.num_state_slots < summary.num_state_slots and sparse.num_blocks > summary.num_blocks
    dense = size_kv_cache(config(max_num_seqs=4, state_snapshot_interval=16), [HYBRID], [20_000_000])
    assert dense.num_state_slots == summary.num_state_slots, "the ratio has a limit"


def test_draft_tokens_have_working_slots():
    plain, speculative = config(max_num_seqs=4), config(max_num_seqs=4)
    settings = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    speculative = replace(speculative, speculative=settings)
    for needs in (HYBRID, ONLY_STATE):
        before, after = (size_kv_cache(each, [needs], [20_000_000]) for each in (plain, speculative))
        num_snapshots = (20_000_000 - 4 * 4 * needs.state_bytes) // (needs.state_bytes + 512 * needs.bytes_per_token)
        assert after.num_state_slots == 4 * 4 + num_snapshots
        assert after.num_blocks <= before.num_blocks
    least = [100 * BLOCK + 3 * 50_000]
    tight = replace(config(max_num_seqs=100, max_model_len=1600), speculative=settings)
    assert size_kv_cache(tight, [HYBRID], least).num_state_slots == 3, "such steps have fewer draft tokens"


def test_blocks_of_one_sequence_come_before_working_slots():
    summary = size_kv_cache(config(max_num_seqs=100, max_model_len=1600), [HYBRID], [100 * BLOCK + 3 * 50_000])
    assert (summary.num_blocks, summary.num_state_slots) == (100, 3)


def test_one_working_slot_and_two_snapshots_are_the_least():
    assert size_kv_cache(config(), [HYBRID], [4 * BLOCK + 150_000]).num_state_slots == 3
    with pytest.raises(CacheError, match=r"100 bytes per token and 3 state slots of 50,000 bytes.*leaves"):
        size_kv_cache(config(), [HYBRID], [4 * BLOCK + 150_000 - 1])
    with pytest.raises(CacheError, match=f"raise kv_cache_memory_bytes to {4 * BLOCK + 150_000}"):
        size_kv_cache(config(kv_cache_memory_bytes=9), [HYBRID], [9])


def test_without_attention_all_memory_is_for_slots():
    summary = size_kv_cache(config(max_num_seqs=4, max_model_len=64), [ONLY_STATE], [50_000 * 10 + 1])
    assert summary.num_state_slots == 10
    # 4 running sequences of 4 blocks, and 6 snapshots of 512 tokens
    assert summary.num_blocks == 4 * 4 + 6 * 32
    assert summary.total_bytes == 500_000
    with pytest.raises(CacheError, match=r"\(3 state slots of 50,000 bytes\)"):
        size_kv_cache(config(), [ONLY_STATE], [149_999])


def test_without_prefix_caching_there_are_as_many_snapshots_as_running_sequences():
    summary = size_kv_cache(config(max_num_seqs=5, enable_prefix_caching=False), [ONLY_STATE], [10**9])
    assert summary.num_state_slots == 10


def test_stages_of_a_pipeline_hold_the_same_slots():
    mixed = [HYBRID, ONLY_STATE, KVCacheNeeds(100, (16,)), KVCacheNeeds(0, (16,))]
    summary = size_kv_cache(config(max_num_seqs=4), mixed, [10**7, 10**6, 10**6, 0])
    assert 3 <= summary.num_state_slots <= 20 and summary.num_blocks == 10**6 // BLOCK


def test_the_summary_names_the_slots():
    summary = size_kv_cache(config(max_num_seqs=4), [HYBRID], [2_000_000])
    assert f"{summary.num_state_slots} state slots" in str(summary)
    assert summary.max_concurrency <= summary.num_state_slots


@given(
    st.integers(1, 500), st.integers(1, 8), st.integers(0, 10**6), st.integers(0, 300), st.integers(1, 30_000),
    st.booleans(), st.sampled_from([0, 16, 512, 5000]), st.integers(0, 50_000),
)  # fmt: skip
def test_it_never_exceeds_the_memory_and_uses_it_for_at_least_one_sequence(
    max_len, seqs, available, bytes_per_token, state_bytes, caching, interval, fixed
):
    needs = [KVCacheNeeds(bytes_per_token, (16,), state_bytes=state_bytes, fixed_state_bytes=fixed)]
    settings = config(
        max_model_len=max_len, max_num_seqs=seqs, enable_prefix_caching=caching, state_snapshot_interval=interval
    )
    longest = max_blocks_of_sequence(max_len, 16)
    try:
        summary = size_kv_cache(settings, needs, [available])
    except CacheError:
        assert available < longest * 16 * bytes_per_token + 3 * state_bytes + fixed
        return
    assert summary.total_bytes <= available
    assert summary.num_blocks >= longest and summary.num_state_slots >= 3
    assert caching or summary.num_state_slots <= max(3, 2 * seqs, seqs + 2)


def test_states_beside_the_slots_are_part_of_the_budget():
    needs = replace(HYBRID, fixed_state_bytes=70_000)
    with_slots = size_kv_cache(config(max_num_seqs=4), [HYBRID], [2_000_000])
    assert size_kv_cache(config(max_num_seqs=4), [needs], [2_070_000]) == replace(
        with_slots, total_bytes=with_slots.total_bytes + 70_000
    )
    least = 4 * BLOCK + 150_000 + 70_000
    assert size_kv_cache(config(), [needs], [least]).num_state_slots == 3
    with pytest.raises(CacheError, match=f"70,000 bytes of states beside.*raise kv_cache_memory_bytes to {least}"):
        size_kv_cache(config(kv_cache_memory_bytes=9), [needs], [least - 1])

"""The number of KV blocks: as many as fit, and an error with the needed size if too few fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mvllm.config.engine_config import CacheConfig, SchedulerConfig
from mvllm.engine.core.kv_cache_sizing import KVCacheSummary, choose_block_size, max_blocks_of_sequence, size_kv_cache
from mvllm.errors import CacheError
from mvllm.platform.worker_protocol import KVCacheNeeds
from tests.unit.engine.builders import make_config

NEEDS = KVCacheNeeds(bytes_per_token=100, block_sizes=(16, 32))
BLOCK = 16 * 100


def config(*, max_model_len=64, max_num_seqs=4, auto=False, **cache):
    settings = make_config(max_model_len=max_model_len, max_model_len_is_auto=auto)
    scheduler = SchedulerConfig(max_num_seqs=max_num_seqs)
    return replace(settings, scheduler=scheduler, cache=CacheConfig(**{"memory_utilization": 0.9, **cache}))


class TestSize:
    def test_it_is_as_many_as_fit(self):
        summary = size_kv_cache(config(), [NEEDS], [7 * BLOCK + BLOCK // 2])
        assert (summary.num_blocks, summary.block_size, summary.total_bytes) == (7, 16, 7 * BLOCK)

    def test_blocks_beyond_those_of_running_sequences_hold_the_prefix_cache(self):
        summary = size_kv_cache(config(), [NEEDS], [10**9])
        assert summary.num_blocks == 10**9 // BLOCK
        assert "sized by memory_utilization 0.9" in str(summary)
        assert "sized by kv_cache_memory_bytes" in str(
            size_kv_cache(config(kv_cache_memory_bytes=10**9), [NEEDS], [10**9])
        )

    def test_without_prefix_caching_it_is_what_all_sequences_of_the_longest_length_use(self):
        def num_blocks(**settings):
            return size_kv_cache(config(enable_prefix_caching=False, **settings), [NEEDS], [10**9]).num_blocks

        assert (num_blocks(), num_blocks(max_model_len=65)) == (4 * 4, 4 * 5)

    def test_the_number_of_slots_fits_32_bits(self):
        summary = size_kv_cache(config(), [KVCacheNeeds(1, (16,))], [10**12])
        assert 2**31 - 16 <= summary.num_blocks * 16 < 2**31

    def test_the_worker_with_the_least_memory_decides(self):
        heavy = KVCacheNeeds(200, (16,))
        assert size_kv_cache(config(), [NEEDS, NEEDS], [9 * BLOCK, 6 * BLOCK]).num_blocks == 6
        summary = size_kv_cache(config(), [NEEDS, heavy], [9 * BLOCK, 10 * BLOCK])
        assert summary.num_blocks == 5
        assert summary.total_bytes == 5 * 2 * BLOCK, "of the worker that holds most"

    def test_exactly_one_sequence_is_enough_and_one_block_less_is_not(self):
        assert size_kv_cache(config(), [NEEDS], [4 * BLOCK]).num_blocks == 4
        with pytest.raises(CacheError):
            size_kv_cache(config(), [NEEDS], [4 * BLOCK - 1])

    @given(
        st.integers(1, 500),
        st.integers(1, 8),
        st.integers(0, 10**6),
        st.sampled_from([1, 8, 16]),
        st.integers(1, 300),
        st.booleans(),
    )
    def test_it_never_exceeds_the_memory_nor_the_maximum_use(
        self, max_len, seqs, available, block_size, bytes_per_token, caching
    ):
        needs = [KVCacheNeeds(bytes_per_token, (block_size,))]
        settings = config(max_model_len=max_len, max_num_seqs=seqs, enable_prefix_caching=caching)
        try:
            summary = size_kv_cache(settings, needs, [available])
        except CacheError:
            assert available < max_blocks_of_sequence(max_len, block_size) * block_size * bytes_per_token
            return
        assert summary.total_bytes <= available
        assert max_blocks_of_sequence(max_len, block_size) <= summary.num_blocks
        assert caching or summary.num_blocks <= seqs * max_blocks_of_sequence(max_len, block_size)


class TestRefusal:
    def refuse(self, available, **settings):
        with pytest.raises(CacheError) as caught:
            size_kv_cache(config(**settings), [NEEDS], [available])
        return str(caught.value)

    def test_it_names_the_needed_and_available_memory_and_the_length_that_fits(self):
        text = self.refuse(3 * BLOCK)
        assert "max_model_len 64 needs" in text and "100 bytes per token" in text
        assert "memory_utilization 0.9 leaves" in text
        assert "set max_model_len to 48 or less" in text

    def test_the_length_it_proposes_does_fit(self):
        assert size_kv_cache(config(max_model_len=48), [NEEDS], [3 * BLOCK]).num_blocks == 3

    def test_it_names_explicit_bytes_with_the_sufficient_number(self):
        text = self.refuse(3 * BLOCK, kv_cache_memory_bytes=3 * BLOCK)
        assert f"raise kv_cache_memory_bytes to {4 * BLOCK}" in text
        assert "utilization" not in text
        size_kv_cache(config(kv_cache_memory_bytes=4 * BLOCK), [NEEDS], [4 * BLOCK])

    def test_it_reports_if_the_weights_already_exceed_the_share(self):
        text = self.refuse(-5 * 2**20)
        assert "the weights and one step already take 5.0 MiB more" in text
        assert "set max_model_len" not in text, "no length fits"


class TestAutoLength:
    """`max_model_len` auto: the longest that fits, never longer than the model's own."""

    def test_it_is_the_longest_that_fits(self):
        summary = size_kv_cache(config(auto=True), [NEEDS], [3 * BLOCK + 1])
        assert (summary.max_model_len, summary.num_blocks) == (48, 3)
        assert size_kv_cache(config(auto=True), [NEEDS], [10**6]).max_model_len == 64
        assert size_kv_cache(config(auto=True), [NEEDS, NEEDS], [10**6, 2 * BLOCK]).max_model_len == 32

    def test_the_log_says_so(self, caplog):
        with caplog.at_level("INFO", "mvllm"):
            size_kv_cache(config(auto=True, max_model_len=2048), [NEEDS], [100 * BLOCK])
        assert "max_model_len auto: 1,600 of the model's 2,048 tokens fit in the KV cache (0.2 MiB)" in caplog.text

    def test_less_than_a_block_is_the_error_of_a_fixed_length(self):
        with pytest.raises(CacheError, match="max_model_len 64 needs"):
            size_kv_cache(config(auto=True), [NEEDS], [BLOCK - 1])
        with pytest.raises(CacheError, match="max_model_len 64 needs") as caught:
            size_kv_cache(config(auto=True), [KVCacheNeeds(100, (1,))], [100])
        assert "auto" not in str(caught.value), "no remedy: it is set"
        assert type(caught.value) is CacheError, "other processes know no subclass"
        assert size_kv_cache(config(auto=True), [KVCacheNeeds(100, (1,))], [200]).max_model_len == 2

    def test_with_windows_layers_stay_grouped_as_the_workers_group_them(self):
        needs = KVCacheNeeds(200, (16,), layer_windows=(32, None))
        whole = size_kv_cache(config(max_model_len=256), [needs], [10**6])
        assert whole.windows == (None, 32) or whole.windows == (32, None)
        summary = size_kv_cache(
            config(auto=True, max_model_len=256), [needs], [3 * whole.total_bytes // whole.num_blocks]
        )
        assert summary.windows == whole.windows and summary.max_model_len < 32
        assert summary.blocks_per_request <= summary.num_blocks

    def test_beside_states(self):
        needs = KVCacheNeeds(100, (16,), state_bytes=1000)
        summary = size_kv_cache(config(auto=True), [needs], [3 * 1000 + 3 * BLOCK])
        assert summary.max_model_len == 48 and summary.num_state_slots == 3
        with pytest.raises(CacheError):
            size_kv_cache(config(auto=True), [needs], [1000])

    @given(st.integers(2, 500), st.integers(0, 10**5), st.sampled_from([1, 8, 16]), st.integers(1, 300))
    def test_a_longer_one_would_not_fit(self, max_len, available, block_size, bytes_per_token):
        needs = [KVCacheNeeds(bytes_per_token, (block_size,))]
        try:
            found = size_kv_cache(config(auto=True, max_model_len=max_len), needs, [available]).max_model_len
        except CacheError:
            assert available < max(2, block_size) * bytes_per_token
            return
        assert found <= max_len
        assert size_kv_cache(config(max_model_len=found), needs, [available]).num_blocks
        if found < max_len:
            with pytest.raises(CacheError):
                size_kv_cache(config(max_model_len=found + 1), needs, [available])


class TestBlockSize:
    def test_by_default_it_is_the_first_that_all_accept(self):
        other = KVCacheNeeds(100, (64, 32, 16))
        assert choose_block_size(config(), [NEEDS]) == 16
        assert choose_block_size(config(), [other, NEEDS]) == 32

    def test_an_explicit_size_is_accepted_or_refused_with_those_offered(self):
        assert choose_block_size(config(block_size=32), [NEEDS]) == 32
        with pytest.raises(CacheError, match=r"block_size 8 was asked for.*accepts 16, 32"):
            choose_block_size(config(block_size=8), [NEEDS])

    def test_workers_without_a_common_size(self):
        with pytest.raises(CacheError, match="none"):
            choose_block_size(config(), [NEEDS, KVCacheNeeds(100, (64,))])


def test_the_summary_names_tokens_and_concurrent_requests():
    summary = KVCacheSummary(num_blocks=10, block_size=16, total_bytes=2**21, max_model_len=64)
    assert (summary.num_tokens, summary.max_concurrency) == (160, 2.5)
    text = str(summary)
    for words in ("160 tokens", "10 blocks of 16", "2.0 MiB", "2.5 concurrent requests of 64 tokens"):
        assert words in text

"""Memory for the KV cache of programs, which may allocate all of it at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mvllm.config.engine_config import CacheConfig
from mvllm.engine.core.kv_cache_sizing import size_kv_cache
from mvllm.platform.runtime import MemoryInfo
from mvllm.platform.worker_protocol import KVCacheNeeds
from mvllm_graph.worker.useful_kv_bytes import useful_kv_bytes
from mvllm_graph.worker.worker import GraphWorker
from tests.unit.engine.builders import make_config
from tests.unit.worker.test_available_kv_bytes import MeasuredRuntime, available


class LargeRuntime(MeasuredRuntime):
    """The same with 1000 GB."""

    def memory(self) -> MemoryInfo:
        small = super().memory()
        return MemoryInfo(*(10**9 * figure for figure in (small.total, small.free, small.used_by_me, self.peak)))


@pytest.mark.parametrize(
    ("needs", "num_seqs", "expected"),
    [
        (KVCacheNeeds(10, (16, 32)), 256, 2 * 256 * (1024 + 32) * 10),  # twice the longest requests, in whole blocks
        (KVCacheNeeds(10, (16,)), 1, 65_536 * 10),  # room for prefix caching
        (KVCacheNeeds(10, (16,), state_bytes=7, fixed_state_bytes=3), 16, 65_536 * 10 + (16 + 128) * 7 + 3),
        (KVCacheNeeds(10, (16,), state_bytes=7, fixed_state_bytes=3), 64, 2 * 64 * 1040 * 10 + (64 + 260) * 7 + 3),
        (KVCacheNeeds(0, (16,), state_bytes=7, fixed_state_bytes=3), 64, 256 * 7 + 3),  # blocks have no memory
    ],
)
def test_on_the_host_a_program_takes_no_more_than_it_can_use(needs, num_seqs, expected) -> None:
    common = {"local_world_size": 1, "utilization": 0.25, "needs": needs, "num_seqs": num_seqs}
    assert available(unified_memory=True, runtime=LargeRuntime(), **common) == 50 * 10**9
    assert available(unified_memory=True, worker_class=GraphWorker, runtime=LargeRuntime(), **common) == expected
    # A device with memory of its own has no other use for it.
    alone = available(
        unified_memory=False, worker_class=GraphWorker, runtime=LargeRuntime(), **(common | {"utilization": 1})
    )
    assert alone == 650 * 10**9


def test_memory_that_is_limited_to_what_is_useful_has_blocks_for_all_tokens_of_a_hybrid_model() -> None:
    """Snapshots of large states do not take the place of blocks, however long the sequences are."""
    config = make_config()
    config = replace(config, model=replace(config.model, max_model_len=32_768), cache=CacheConfig())
    needs = KVCacheNeeds(100, (16,), state_bytes=500_000, fixed_state_bytes=1000)
    num_seqs = config.scheduler.max_num_seqs
    summary = size_kv_cache(config, [needs], [useful_kv_bytes(config, needs)])
    assert summary.num_blocks * 16 >= 1.9 * num_seqs * 32_768 and summary.num_state_slots > num_seqs

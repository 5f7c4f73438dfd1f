"""What a worker may take for its KV cache, alone and beside others."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from mvllm.config.engine_config import CacheConfig, ParallelConfig
from mvllm.platform.runtime import MemoryInfo
from mvllm.platform.topology import WorkerContext
from mvllm.worker.worker import Worker
from tests.unit.engine.builders import make_config
from tests.unit.worker.builders import HostRuntime
from tests.unit.worker.fake_platform import FakePlatform


class MeasuredRuntime(HostRuntime):
    """100 bytes of 1000 are this process's, 700 are free; a step takes 50."""

    peak = 100

    def memory(self) -> MemoryInfo:
        return MemoryInfo(total=1000, free=700, used_by_me=100, peak_by_me=self.peak)


def test_other_programs_on_the_host_do_not_use_up_our_share() -> None:
    """They have taken 200 of 1000: with a share below that, there would be nothing left to begin with."""
    assert available(unified_memory=True, local_world_size=1, utilization=0.25) == 700 - 600 - 50


def available(*, unified_memory: bool, local_world_size: int, utilization: float = 0.75, replicas: int = 1) -> int:
    platform = FakePlatform()
    platform.capabilities = replace(platform.capabilities, unified_memory=unified_memory)
    config = replace(
        make_config(),
        cache=CacheConfig(memory_utilization=utilization),
        parallel=ParallelConfig(data_parallel_size=replicas),
    )
    worker = Worker(config, platform, WorkerContext(world_size=8, local_world_size=local_world_size))
    worker._runtime = runtime = MeasuredRuntime()
    worker._runner = SimpleNamespace(profile=lambda: setattr(runtime, "peak", 150))
    return worker.available_kv_bytes()


@pytest.mark.parametrize(
    ("unified_memory", "local_world_size", "expected"),
    [
        (False, 1, 700 - 250 - 50),
        (False, 4, 700 - 250 - 50),  # each has a device with memory of its own
        (True, 1, 700 - 200 - 50),  # a quarter of the 800 that other programs leave
        (True, 2, (700 - 225) // 2 - 50),  # a quarter of 900, for both have taken 100; and each has its own step
        (True, 9, (700 - 250) // 9 - 50),  # never of more than there is
    ],
)
def test_workers_that_have_one_memory_share_it(unified_memory: bool, local_world_size: int, expected: int) -> None:
    assert available(unified_memory=unified_memory, local_world_size=local_world_size) == expected


def test_other_replicas_may_still_have_to_load() -> None:
    """Two replicas of three workers: 300 bytes that are free now may soon be the other one's."""
    reserve = 250  # a quarter of 1000, which is all there is
    assert available(unified_memory=True, local_world_size=6, replicas=2) == (700 - 300 - reserve) // 6 - 50
    assert available(unified_memory=False, local_world_size=6, replicas=2) == 700 - reserve - 50

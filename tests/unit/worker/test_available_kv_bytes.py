"""Memory available for the KV cache of a worker, alone and with other workers on the machine."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from mvllm.config.engine_config import CacheConfig, ParallelConfig, SchedulerConfig
from mvllm.platform.runtime import MemoryInfo
from mvllm.platform.topology import WorkerContext
from mvllm.platform.worker_protocol import KVCacheNeeds
from mvllm.worker.worker import Worker
from tests.unit.engine.builders import make_config
from tests.unit.worker.builders import HostRuntime
from tests.unit.worker.fake_platform import FakePlatform


class MeasuredRuntime(HostRuntime):
    """A runtime with 1000 bytes: 100 used by this process, 700 free; a step takes 50."""

    peak = 100

    def memory(self) -> MemoryInfo:
        return MemoryInfo(total=1000, free=700, used_by_me=100, peak_by_me=self.peak)


def test_memory_of_other_programs_does_not_reduce_the_kv_cache_share() -> None:
    """Other programs use 200 of 1000 bytes: counted in the share, they would leave nothing."""
    assert available(unified_memory=True, local_world_size=1, utilization=0.25) == 700 - 600 - 50


def test_the_encoder_cache_reduces_the_kv_cache() -> None:
    assert available(unified_memory=False, local_world_size=1, encoder_cache=120) == 700 - 250 - 50 - 120


def available(
    *,
    unified_memory: bool,
    local_world_size: int,
    utilization: float = 0.75,
    replicas: int = 1,
    encoder_cache: int = 0,
    worker_class: type[Worker] = Worker,
    runtime: MeasuredRuntime | None = None,
    needs: KVCacheNeeds | None = None,
    num_seqs: int = 128,
) -> int:
    platform = FakePlatform()
    platform.capabilities = replace(platform.capabilities, unified_memory=unified_memory)
    config = make_config()
    config = replace(
        config,
        model=replace(config.model, max_model_len=1024),
        cache=CacheConfig(memory_utilization=utilization),
        scheduler=SchedulerConfig(
            max_num_seqs=num_seqs, max_num_batched_tokens=512
        ),  # a step that runs the whole batch
        parallel=ParallelConfig(data_parallel_size=replicas),
    )
    worker = worker_class(config, platform, WorkerContext(world_size=8, local_world_size=local_world_size))
    worker._runtime = runtime = runtime or MeasuredRuntime()
    loader = SimpleNamespace(model=SimpleNamespace(remote_methods=frozenset()))
    worker._runner = SimpleNamespace(
        profile=lambda part: setattr(runtime, "peak", 150),
        loader=loader,
        encode_largest_item=lambda: None,
        encoder_cache_bytes=lambda: encoder_cache,
        kv_cache_needs=lambda: needs,
    )
    return worker.available_kv_bytes()


class StepRuntime(HostRuntime):
    """Memory in use, and the peak since the last reset, if it can be reset."""

    def __init__(self, *, resets: bool = True) -> None:
        super().__init__()
        self.used = 10_000_000
        self.peak = self.used if resets else 90_000_000
        self._resets = resets

    def memory(self) -> MemoryInfo:
        return MemoryInfo(total=10**9, free=8 * 10**8, used_by_me=self.used, peak_by_me=self.peak)

    def reset_peak_memory(self) -> None:
        if self._resets:
            self.peak = self.used


class Steps:
    """A runner whose steps take memory per token and a constant; the first step leaves a buffer."""

    def __init__(self, runtime: StepRuntime, config: SchedulerConfig) -> None:
        self._runtime, self._tokens = runtime, config.max_num_batched_tokens
        self.parts: list[int] = []

    def profile(self, part: int) -> None:
        runtime = self._runtime
        if not self.parts:
            runtime.used += 700_000
        self.parts.append(part)
        runtime.peak = max(runtime.peak, runtime.used + 30_000 + 1_000 * -(-self._tokens // part))


def measured(scheduler: SchedulerConfig, runtime: StepRuntime, **capabilities: bool) -> tuple[int, list[int]]:
    """The measured peak of a step, and the divisors of the profile runs."""
    platform = FakePlatform()
    platform.capabilities = replace(platform.capabilities, **capabilities)
    worker = Worker(replace(make_config(), scheduler=scheduler), platform, WorkerContext())
    worker._runtime, worker._runner = runtime, (steps := Steps(runtime, scheduler))
    return worker._peak_step_bytes(), steps.parts


LARGE = SchedulerConfig(max_num_batched_tokens=2048, max_num_seqs=256)
WHOLE = 700_000 + 30_000 + 2048 * 1_000


def test_small_profile_steps_bound_the_memory_of_the_largest() -> None:
    found, parts = measured(LARGE, StepRuntime(), scaled_memory_profile=True)
    assert sum(2048 / part for part in parts) < 2048 / 10
    assert WHOLE <= found <= 1.6 * WHOLE


@pytest.mark.parametrize(
    ("scheduler", "resets", "capabilities"),
    [
        (LARGE, True, {"unified_memory": True}),
        (LARGE, False, {"scaled_memory_profile": True}),  # the measured peak is that of loading
        (replace(LARGE, max_num_batched_tokens=512), True, {"scaled_memory_profile": True}),
        (replace(LARGE, max_num_seqs=8), True, {"scaled_memory_profile": True}),  # its prompts would be shorter
    ],
)
def test_on_other_devices_the_profile_runs_the_largest_step(
    scheduler: SchedulerConfig, resets: bool, capabilities: dict[str, bool]
) -> None:
    runtime = StepRuntime(resets=resets)
    found, parts = measured(scheduler, runtime, **capabilities)
    assert parts == [1]
    assert found == max(0, runtime.peak - 10_000_000)


@pytest.mark.parametrize(
    ("unified_memory", "local_world_size", "expected"),
    [
        (False, 1, 700 - 250 - 50),
        (False, 4, 700 - 250 - 50),  # each has a device with separate memory
        (True, 1, 700 - 200 - 50),  # a quarter of the 800 that other programs leave
        (True, 2, (700 - 225) // 2 - 50),  # a quarter of 900, because both use 100; and each has its own step
        (True, 9, (700 - 250) // 9 - 50),  # never more than the free memory
    ],
)
def test_workers_with_unified_memory_divide_it(unified_memory: bool, local_world_size: int, expected: int) -> None:
    assert available(unified_memory=unified_memory, local_world_size=local_world_size) == expected


def test_memory_is_left_for_replicas_that_are_still_loading() -> None:
    """Two replicas of three workers: 300 bytes that are free now may be used by the other replica."""
    reserve = 250  # a quarter of 1000, the whole free memory
    assert available(unified_memory=True, local_world_size=6, replicas=2) == (700 - 300 - reserve) // 6 - 50
    assert available(unified_memory=False, local_world_size=6, replicas=2) == 700 - reserve - 50

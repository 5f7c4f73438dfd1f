"""A platform's device: copies, memory figures, seeds, and the statements it makes about itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mvllm.config.engine_config import ParallelConfig
from mvllm.platform.spec import CONTRACT, CheckStatus
from mvllm.platform.topology import WorkerContext


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.bool])
def test_values_survive_the_way_to_the_device_and_back(runtime, dtype):
    host = (torch.arange(60).view(3, 20) % 7).to(dtype)
    device = runtime.to_device(host.clone())
    runtime.synchronize()
    assert torch.equal(runtime.to_host(device).wait(), host)


def test_numpy_arrays_reach_the_device(runtime):
    array = np.arange(12, dtype=np.int32)
    assert runtime.to_host(runtime.from_numpy(array)).wait().tolist() == array.tolist()


def test_a_host_copy_may_be_waited_for_twice(runtime):
    copy = runtime.to_host(runtime.to_device(torch.arange(5)))
    assert copy.wait().tolist() == copy.wait().tolist() == list(range(5))


def test_a_host_copy_outlives_what_it_was_made_from(runtime):
    """DEV-05."""
    copy = runtime.to_host(runtime.to_device(torch.arange(4096)) * 2)
    for _ in range(4):
        runtime.empty((4096,), torch.int64).fill_(-1)
    assert copy.wait().tolist() == list(range(0, 8192, 2))


def test_empty_and_host_buffers_have_the_shape_and_dtype_asked_for(runtime):
    for make in (runtime.empty, runtime.host_buffer):
        tensor = make((3, 5), torch.float32)
        assert tensor.shape == (3, 5) and tensor.dtype == torch.float32


def test_memory_figures_are_consistent(runtime):
    runtime.reset_peak_memory()
    memory = runtime.memory()
    assert 0 <= memory.free <= memory.total and 0 <= memory.used_by_me <= memory.total
    assert memory.peak_by_me >= memory.used_by_me


def test_peak_follows_an_allocation_that_is_gone_again(runtime):
    runtime.reset_peak_memory()
    before = runtime.memory()
    tensor = runtime.empty((96 << 20,), torch.uint8)
    tensor.fill_(1)
    runtime.synchronize()
    del tensor
    assert runtime.memory().peak_by_me - before.used_by_me > 80 << 20


def test_health_of_a_healthy_device_is_silent(runtime):
    runtime.synchronize()
    runtime.step_mark()
    runtime.health()


def test_null_or_not_events_and_streams_can_be_used(runtime):
    event = runtime.event()
    with runtime.stream():
        event.record()
    event.wait()
    event.synchronize()


def test_two_reads_of_spec_and_capabilities_are_equal(platform):
    assert platform.spec == platform.spec
    assert platform.capabilities == platform.capabilities
    assert platform.spec.contract[0] == CONTRACT[0] and platform.spec.contract[1] <= CONTRACT[1]


def test_topology_is_pure_and_gives_every_worker_its_variables(platform):
    for parallel in (ParallelConfig(), ParallelConfig(tensor_parallel_size=2)):
        topology = platform.topology(parallel)
        assert topology == platform.topology(parallel)
        assert topology.num_workers * topology.devices_per_worker >= parallel.world_size
        assert topology.executors
        assert len(topology.env_per_worker) in (0, topology.num_workers)


def test_diagnostics_have_stable_ids_and_remedies(platform):
    checks = platform.doctor()
    ids = [check.id for check in checks]
    assert len(set(ids)) == len(ids)
    for check in checks:
        assert check.id.startswith(f"platform.{platform.spec.name}.") and check.found
        assert check.remedy or check.status is CheckStatus.OK


def test_shutdown_is_idempotent(platform):
    runtime = platform.init_device(WorkerContext())
    runtime.shutdown()
    runtime.shutdown()

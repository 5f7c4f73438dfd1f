"""DEV and MEM: copies, ordering, errors and memory accounting of a bound device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mvllm.extension_api.testing import enter_phase, torch_dtype
from mvllm.plugin_api import DeviceRuntime, MemoryInfo, Phase, WorkerContext
from mvllm_conformance.markers import clause, exhaustive, skip_not_run
from mvllm_conformance.platform_under_test import PlatformUnderTest
from mvllm_conformance.rank_launcher import parallel_config, ranks_skip_reason, run_ranks, topology_of
from mvllm_conformance.tensor_assertions import assert_equal

COPIED_DTYPES = [torch.int32, torch.int64, torch.uint8, torch.bool]
"""Dtypes that core copies in addition to the compute dtypes."""
BIG = 96 << 20
"""Bytes of an allocation that is large compared with a process's other allocations."""


def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Integers, or random values that use all bits of a floating dtype."""
    if dtype.is_floating_point:
        return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    count = int(np.prod(shape))
    return (torch.arange(count) % 7).view(shape).to(dtype)


@clause("DEV-01")
def test_a_worker_binds_its_device(subject: PlatformUnderTest) -> None:
    [result] = run_ranks(subject, 1, ["bind", "join", "close"])
    assert not result.error_of("bind"), result.error_of("bind")


@clause("DEV-01")
def test_each_local_rank_binds_a_device_of_its_own(subject: PlatformUnderTest) -> None:
    topology = topology_of(subject, parallel_config(tensor=2))
    if topology.num_workers < 2:
        skip_not_run("one worker drives the devices of all ranks")
    if why := ranks_skip_reason(subject, 2):
        skip_not_run(why)
    results = run_ranks(subject, 2, ["bind"], local_ranks=[0, 1])
    for rank, result in enumerate(results):
        assert not result.error_of("bind"), f"local_rank {rank}: {result.error_of('bind')}"
    # If environment variables hide other devices from each worker, all may use the same device index.
    same_variables = not topology.env_per_worker or topology.env_per_worker[0] == topology.env_per_worker[1]
    first, second = (str(result.answers["bind"]["device"]) for result in results)
    if subject.num_devices >= 2 and same_variables and ":" in first:
        assert first != second, f"of {subject.num_devices} devices, local ranks 0 and 1 have both bound {first}"


@clause("DEV-01")
def test_the_device_is_what_torch_takes_for_one(bound_device: DeviceRuntime) -> None:
    made = torch.zeros(3, device=bound_device.device)
    assert made.device.type == torch.device(bound_device.device).type
    assert bound_device.to_host(made).wait().tolist() == [0, 0, 0]


@clause("DEV-02")
@pytest.mark.parametrize("dtype", COPIED_DTYPES, ids=str)
def test_values_survive_the_way_to_the_device_and_back(bound_device: DeviceRuntime, dtype: torch.dtype) -> None:
    host = values(dtype, 3, 20)
    copy = bound_device.to_device(host.clone())
    assert copy.shape == host.shape and copy.dtype == dtype
    assert_equal(bound_device.to_host(copy).wait(), host, "a tensor copied to the device and back")


@clause("DEV-02")
@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4), (0, 4), pytest.param((300, 1000), marks=exhaustive)])
def test_values_of_every_compute_dtype_survive(
    bound_device: DeviceRuntime, claimed_dtype: str, shape: tuple[int, ...]
) -> None:
    host = values(torch_dtype(claimed_dtype), *shape)
    back = bound_device.to_host(bound_device.to_device(host.clone())).wait()
    assert_equal(back, host, "a tensor copied to the device and back")


@clause("DEV-02")
def test_views_survive(bound_device: DeviceRuntime) -> None:
    host = values(torch.float32, 6, 8)
    for view in (host[:, :5], host.t(), host[::2]):
        back = bound_device.to_host(bound_device.to_device(view.clone())).wait()
        assert_equal(back, view, f"a view with strides {view.stride()} copied to the device and back")
        copy = bound_device.to_device(host.clone())
        assert_equal(bound_device.to_host(copy[:, 2:5]).wait(), host[:, 2:5], "columns 2 to 4 of a device tensor")


@clause("DEV-02")
def test_numpy_arrays_reach_the_device(bound_device: DeviceRuntime) -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    assert bound_device.to_host(bound_device.from_numpy(array)).wait().tolist() == array.tolist()


@clause("DEV-02")
def test_copies_are_ordered_after_the_work_before_them(bound_device: DeviceRuntime) -> None:
    matrix = bound_device.to_device(torch.eye(256))
    for _ in range(20):
        matrix = matrix @ matrix
    matrix.add_(1)
    copy = bound_device.to_host(matrix)
    assert_equal(copy.wait(), torch.eye(256) + 1, "a copy that was requested after 21 operations")


@clause("DEV-02")
def test_a_host_copy_holds_what_was_there_when_it_was_asked_for(bound_device: DeviceRuntime) -> None:
    if bound_device.device == torch.empty(0).device:
        skip_not_run("the device is the host: a copy is the tensor itself")
    tensor = bound_device.to_device(torch.zeros(1 << 20))
    copy = bound_device.to_host(tensor)
    tensor.add_(1)  # ordered after the copy
    assert_equal(copy.wait(), torch.zeros(1 << 20), "a copy that was requested before 1 was added")


@clause("DEV-02")
def test_a_host_copy_may_be_waited_for_twice(bound_device: DeviceRuntime) -> None:
    copy = bound_device.to_host(bound_device.to_device(torch.arange(5)))
    assert copy.wait().tolist() == copy.wait().tolist() == list(range(5))


@clause("DEV-03")
def test_shutdown_may_be_called_twice(subject: PlatformUnderTest, free_device: None) -> None:
    with enter_phase(Phase.WORKER):
        runtime = subject.platform.init_device(WorkerContext())
        runtime.shutdown()
        runtime.shutdown()


@clause("DEV-04")
@pytest.mark.parametrize("shape", [(3, 5), (7,), (0, 2)])
def test_empty_gives_what_was_asked_for_on_the_device(
    bound_device: DeviceRuntime, claimed_dtype: str, shape: tuple[int, ...]
) -> None:
    tensor = bound_device.empty(shape, torch_dtype(claimed_dtype))
    assert tuple(tensor.shape) == shape and tensor.dtype == torch_dtype(claimed_dtype)
    assert tensor.device.type == torch.device(bound_device.device).type


@clause("DEV-04")
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32], ids=str)
def test_host_buffers_can_be_written_through_numpy(bound_device: DeviceRuntime, dtype: torch.dtype) -> None:
    buffer = bound_device.host_buffer((3, 5), dtype)
    assert tuple(buffer.shape) == (3, 5) and buffer.dtype == dtype
    buffer.numpy()[:] = np.arange(15).reshape(3, 5)
    assert bound_device.to_host(bound_device.to_device(buffer)).wait().flatten().tolist() == list(range(15))


@clause("DEV-05")
def test_work_after_an_event_sees_the_work_before_it(bound_device: DeviceRuntime) -> None:
    tensor = bound_device.to_device(torch.zeros(1 << 16))
    event = bound_device.event()
    with bound_device.stream():
        for _ in range(50):
            tensor.add_(1)
        event.record()
    event.wait()
    doubled = tensor * 2
    wanted = torch.full((1 << 16,), 100.0)
    assert_equal(bound_device.to_host(doubled).wait(), wanted, "twice the result of 50 additions before the event")
    event.synchronize()


@clause("DEV-05")
def test_an_event_that_was_synchronized_is_reached(bound_device: DeviceRuntime) -> None:
    tensor = bound_device.to_device(torch.ones(8))
    tensor.mul_(3)
    event = bound_device.event()
    event.record()
    event.synchronize()
    bound_device.synchronize()
    assert bound_device.to_host(tensor).wait().tolist() == [3.0] * 8


@clause("DEV-06")
def test_a_healthy_device_is_silent(bound_device: DeviceRuntime) -> None:
    bound_device.to_device(torch.arange(3)).add_(1)
    bound_device.step_mark()
    bound_device.synchronize()
    bound_device.health()
    bound_device.seed(7)
    bound_device.release_cached_memory()


@clause("DEV-08")
def test_tensors_from_outside_are_used_in_the_inference_mode(bound_device: DeviceRuntime) -> None:
    cache = bound_device.to_device(torch.zeros(4, 2, 3))
    weight = torch.nn.Parameter(bound_device.to_device(torch.arange(12.0).view(4, 3)))
    with bound_device.inference_mode():
        rows = cache.flatten(0, 1)
        rows.index_copy_(0, bound_device.to_device(torch.tensor([1, 6])), weight.view(2, 2, 3)[:, 1])
        product = weight.t() @ weight
        rows[0] = 5.0
        assert not product.requires_grad
    expected = torch.zeros(8, 3)
    expected[1], expected[6], expected[0] = torch.tensor([3.0, 4, 5]), torch.tensor([9.0, 10, 11]), 5.0
    assert_equal(bound_device.to_host(cache).wait().view(8, 3), expected, "values that were written in inference_mode")
    host = torch.arange(12.0).view(4, 3)
    assert_equal(bound_device.to_host(product).wait(), host.t() @ host, "a product in inference_mode")


@clause("DEV-07")
def test_a_host_copy_outlives_what_it_was_made_from(bound_device: DeviceRuntime) -> None:
    copy = bound_device.to_host(bound_device.to_device(torch.arange(4096)) * 2)
    for _ in range(4):
        bound_device.empty((4096,), torch.int64).fill_(-1)
    assert copy.wait().tolist() == list(range(0, 8192, 2))


@clause("MEM-01")
def test_memory_figures_are_consistent(bound_device: DeviceRuntime) -> None:
    bound_device.reset_peak_memory()
    memory = bound_device.memory()
    assert isinstance(memory, MemoryInfo)
    for name in ("total", "free", "used_by_me", "peak_by_me"):
        figure = getattr(memory, name)
        assert type(figure) is int, f"memory().{name} is {figure!r}; it must be a number of bytes, as int"
    assert memory.total > 0, f"memory().total is {memory.total}; it must be the device's memory in bytes"
    for name in ("free", "used_by_me"):
        figure = getattr(memory, name)
        assert 0 <= figure <= memory.total, f"memory().{name} is {figure:,}, outside of 0 to total, {memory.total:,}"
    assert memory.peak_by_me >= memory.used_by_me, (
        f"memory().peak_by_me, {memory.peak_by_me:,}, is less than used_by_me at the same time, {memory.used_by_me:,}"
    )


@clause("MEM-01")
def test_what_this_process_takes_is_counted_as_its_own(bound_device: DeviceRuntime) -> None:
    bound_device.synchronize()
    held, before, during = filled_anew(bound_device)
    grown = during.used_by_me - before.used_by_me
    assert grown > 0.8 * BIG, f"memory().used_by_me grew by {grown:,} while a tensor of {BIG:,} bytes was made"
    assert during.peak_by_me >= during.used_by_me, (
        f"memory().peak_by_me, {during.peak_by_me:,}, is less than used_by_me, {during.used_by_me:,}"
    )
    del held


@clause("MEM-06")
def test_memory_that_this_process_holds_is_not_free(bound_device: DeviceRuntime) -> None:
    held = filled(bound_device)
    memory = bound_device.memory()
    assert memory.free <= memory.total - 0.8 * BIG, (
        f"memory().free is {memory.free:,} of {memory.total:,} bytes while this process holds a tensor of {BIG:,}: "
        "`free` must be what can still be allocated"
    )
    del held


@clause("MEM-02")
def test_an_allocation_that_does_not_fit_is_a_memory_error(bound_device: DeviceRuntime) -> None:
    try:
        bound_device.empty((1 << 50,), torch.uint8)
    except MemoryError:
        pass
    except Exception as e:  # noqa: BLE001  (a plugin may raise anything)
        pytest.fail(f"`empty` of a tensor that does not fit must raise MemoryError; it raised {type(e).__name__}: {e}")
    else:
        pytest.fail("`empty` returned a tensor of 2**50 bytes; it must raise MemoryError where one does not fit")
    assert bound_device.to_host(bound_device.to_device(torch.arange(3))).wait().tolist() == [0, 1, 2], (
        "the device no longer works"
    )


@clause("MEM-02")
def test_a_cache_that_does_not_fit_is_a_memory_error(subject: PlatformUnderTest, bound_device: DeviceRuntime) -> None:
    from mvllm_conformance.attention_cases import make_spec

    backend = subject.platform.attention_backend(make_spec(dtype=subject.capabilities.dtypes[0]))
    layout = backend.kv_layout()
    block_size = layout.block_sizes[0]
    too_many = 4 * bound_device.memory().total // (layout.bytes_per_token * block_size)
    with pytest.raises(MemoryError):
        backend.allocate(too_many, block_size, bound_device.device)


@clause("MEM-03")
def test_peak_follows_an_allocation_that_is_gone_again(bound_device: DeviceRuntime) -> None:
    bound_device.reset_peak_memory()
    held: Any
    held, before, _ = filled_anew(bound_device)
    del held
    bound_device.synchronize()
    risen = bound_device.memory().peak_by_me - before.used_by_me
    assert risen > 0.8 * BIG, (
        f"memory().peak_by_me lies {risen:,} bytes above what was used before a tensor of {BIG:,} bytes was made and "
        "freed: the peak must include memory that has been freed"
    )


@clause("MEM-03")
def test_a_reset_lets_the_peak_begin_anew(bound_device: DeviceRuntime) -> None:
    held: Any = filled(bound_device)
    del held
    bound_device.synchronize()
    bound_device.release_cached_memory()
    peak = bound_device.memory().peak_by_me
    bound_device.reset_peak_memory()
    memory = bound_device.memory()
    assert memory.peak_by_me < peak - 0.5 * BIG or memory.peak_by_me - memory.used_by_me < 0.5 * BIG, (
        f"after reset_peak_memory, memory().peak_by_me is {memory.peak_by_me:,}; it was {peak:,} before, and "
        f"{memory.used_by_me:,} bytes are used"
    )


@clause("MEM-04")
def test_the_error_of_a_tensor_without_room_is_known_and_others_are_not(bound_device: DeviceRuntime) -> None:
    try:
        torch.empty((1 << 50,), dtype=torch.uint8, device=bound_device.device)
    except (RuntimeError, MemoryError) as e:  # a lazy device may not allocate yet
        assert bound_device.is_out_of_memory(e) is True, (
            f"is_out_of_memory must be true for the error of a tensor that does not fit, {type(e).__name__}: {e}"
        )
    assert bound_device.is_out_of_memory(MemoryError("no room")) is True, "is_out_of_memory must know MemoryError"
    for other in (ValueError("memory"), RuntimeError("shapes do not match"), KeyError("out of")):
        assert bound_device.is_out_of_memory(other) is False, f"is_out_of_memory must be false for {other!r}"


def filled_anew(runtime: DeviceRuntime, most: int = 4) -> tuple[list[torch.Tensor], MemoryInfo, MemoryInfo]:
    """Tensors of BIG bytes, as many as it takes until the last one lies in memory that the process did not have before.

    Memory that earlier tests have freed may still be the process's, as with malloc on the host, and serve the first.

    Args:
        runtime: The bound device.
        most: How many tensors at most.

    Returns:
        The tensors, and the memory before and after the last one was made.
    """
    held: list[torch.Tensor] = []
    while True:
        before = runtime.memory()
        held.append(filled(runtime))
        after = runtime.memory()
        if len(held) == most or after.used_by_me - before.used_by_me > 0.8 * BIG:
            return held, before, after


def filled(runtime: DeviceRuntime) -> torch.Tensor:
    """A tensor of BIG bytes whose memory the device has allocated."""
    tensor = runtime.empty((BIG,), torch.uint8)
    tensor.fill_(1)
    runtime.step_mark()
    runtime.synchronize()
    return tensor

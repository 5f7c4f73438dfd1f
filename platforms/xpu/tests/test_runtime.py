"""The runtime over a replacement of torch.xpu that lacks functions or fails."""

from __future__ import annotations

import gc

import pytest
import torch
from platforms.xpu.tests import fake_device
from platforms.xpu.tests.fake_device import HOSTED, XPU
from platforms.xpu.tests.hosted_platform import HostedPlatform, HostedRuntime

from mvllm.plugin_api import PlatformError, WorkerContext
from mvllm_torch_gpu.graphs import DeviceGraphs
from mvllm_torch_gpu.memory import DeviceMemory, available_host_memory
from mvllm_xpu.driver_memory import FdinfoDriverMemory


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    for name in ("reports_free", "broken", "initialised"):
        monkeypatch.setattr(XPU, name, False)
    monkeypatch.setattr(XPU, "graphs", [])


@pytest.fixture
def runtime():
    return HostedRuntime(WorkerContext(), unified=True)


def test_a_worker_counts_devices_after_the_start_of_the_driver(monkeypatch):
    monkeypatch.setattr(XPU, "devices", 1)
    assert XPU.device_count() == 3, "by a library that knows no selector"
    with pytest.raises(PlatformError, match=r"worker 1 of this machine.*but Level Zero shows 1"):
        HostedRuntime(WorkerContext(rank=1, local_rank=1, local_world_size=2, world_size=2), unified=True)


def test_a_driver_that_does_not_start_shows_no_device(monkeypatch, caplog):
    def fails():
        raise RuntimeError("No XPU devices are available.\nand more")

    monkeypatch.setattr(XPU, "init", fails)
    with pytest.raises(PlatformError, match="Level Zero shows 0"):
        HostedRuntime(WorkerContext(), unified=True)
    assert "Level Zero does not start: No XPU devices are available." in caplog.text


def test_copies_keep_values_and_events_are_those_of_the_module(runtime):
    host = runtime.host_buffer((3,), torch.float32)
    host.copy_(torch.tensor([1.0, 2.0, 3.0]))
    assert runtime.to_host(runtime.to_device(host) * 2).wait().tolist() == [2.0, 4.0, 6.0]
    event = runtime.event()
    event.record()
    event.wait()
    event.synchronize()
    with pytest.raises(TypeError):
        XPU.Event(blocking=True)


def test_a_second_stream_waits_for_earlier_work_of_the_first(runtime):
    first = XPU.current_stream()
    with runtime.stream():
        second = XPU.current_stream()
        assert second is not first and second.waited_for[-1] is first
    assert XPU.current_stream() is first


def test_unreported_free_bytes_are_replaced_by_the_hosts(runtime):
    with pytest.raises(RuntimeError, match="doesn't support querying"):
        XPU.mem_get_info()
    info = runtime.memory()
    assert 0 < info.free <= info.total and abs(info.free - available_host_memory()) < 1 << 30
    runtime.health()


def test_a_card_without_free_bytes_has_its_total_minus_our_own():
    stats = DeviceMemory(fake_device.HOST, FdinfoDriverMemory(None), 1 << 20, unified=False, module=HOSTED).stats()
    assert stats.driver_free == stats.total - stats.reserved - (1 << 20) and stats.used_by_others <= 1 << 20


@pytest.mark.parametrize(("reported", "expected"), [(0, None), (24, 17), (9, 9)])
def test_free_bytes_that_the_driver_reports_wrongly_are_not_used(monkeypatch, reported, expected):
    """0 for a card with memory, and free bytes that do not shrink when this process allocates."""
    monkeypatch.setattr(XPU, "mem_get_info", lambda device=None: (reported, 24))
    monkeypatch.setattr(XPU, "memory_reserved", lambda device=None: 7)
    assert HOSTED.free_and_total(fake_device.HOST) == (expected, 24)


def test_other_errors_are_not_memory_errors(runtime, monkeypatch):
    def lost(device=None):
        raise RuntimeError("level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)")

    monkeypatch.setattr(XPU, "mem_get_info", lost)
    with pytest.raises(RuntimeError, match="DEVICE_LOST"):
        HOSTED.free_and_total(fake_device.HOST)


def test_a_failed_device_is_an_error_with_a_remedy(runtime):
    XPU.broken = True
    with pytest.raises(PlatformError, match=r"does not answer: level_zero backend.*See the kernel's log \(dmesg"):
        runtime.health()


def test_graphs_read_the_current_values_of_their_inputs():
    graphs, x = DeviceGraphs(fake_device.HOST, HOSTED), torch.tensor([1.0, 2.0])
    results = []
    replay = graphs.capture(lambda: results.append(x * 3))
    assert torch.isnan(results[0]).all(), "a capture computes nothing"
    x.copy_(torch.tensor([5.0, 7.0]))
    replay()
    assert results[0].tolist() == [15.0, 21.0]
    assert len(XPU.graphs) == 1 and XPU.graphs[0].replays == 1


def test_a_capture_that_waits_fails_and_restores_the_stream():
    before, x = XPU.current_stream(), torch.tensor([1.0])
    with pytest.raises(PlatformError, match="cannot be captured in a graph"):
        DeviceGraphs(fake_device.HOST, HOSTED).capture(lambda: float(x))
    assert XPU.current_stream() is before


def test_shutdown_may_be_called_twice(runtime):
    runtime.shutdown()
    runtime.shutdown()
    gc.collect()


def test_without_triton_sdpa_is_preferred():
    backends = [backend.__name__ for backend in HostedPlatform().attention_without_kernels()]
    assert backends == ["SdpaAttention", "ReferenceAttention"]

"""A module like `torch.xpu` whose devices are the host: the same names, behaviour and missing functions.

    device count   before `init` it is another number, like that of a library that ignores the selector
    memory         the process's; free bytes are not reported, as by integrated GPUs, unless a test sets `reports_free`
    events         have no parameter `blocking`
    graphs         operations are recorded and run again; operations that make the host wait fail in a capture
    waiting        cannot be forbidden

`HOSTED` is the platform's DeviceModule over this module, with tensors on the host.
"""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from mvllm_cpu import host_resources
from mvllm_xpu.device_module import XpuModule
from tests.helpers.host_sync import ForbidSynchronizingOps

host_graphs = importlib.import_module("platforms.torch-gpu.tests.host_graphs")

HOST = torch.device("cpu")
NOT_TOLD = "The device (Host) doesn't support querying the available free memory. You can file an issue."


class Stream:
    """A stream whose work is done when a call returns."""

    def __init__(self, device: torch.device | None = None, priority: int = 0) -> None:
        self.device = device
        self.waited_for: list[Stream] = []

    def query(self) -> bool:
        if XPU.broken:
            raise RuntimeError("level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)\nand more")
        return True

    def wait_stream(self, stream: Stream) -> None:
        self.waited_for.append(stream)


class Event:
    """An event that is reached as soon as it is recorded."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.recorded = False

    def record(self, stream: Stream | None = None) -> None:
        self.recorded = True

    def wait(self, stream: Stream | None = None) -> None:
        assert self.recorded

    def synchronize(self) -> None:
        assert self.recorded, "the event was not recorded"


class XPUGraph:
    """Recorded operations."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.calls: list[Any] = []
        XPU.graphs.append(self)
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for call in self.calls:
            call.run_again()


class FakeXpuModule:
    """A replacement of the module `torch.xpu`.

    Attributes:
        devices: Number of devices; all of them are the host.
        memory_bytes: Memory of each device; None for that of the host.
        reports_free: Whether free bytes are reported.
        broken: Whether the device does not answer.
        graphs: All created graphs.
        current: The current stream.
    """

    Event, Stream, XPUGraph = Event, Stream, XPUGraph

    def __init__(self) -> None:
        self.devices = 8
        self.memory_bytes: int | None = None
        self.reports_free = self.broken = self.initialised = False
        self.graphs: list[XPUGraph] = []
        self.current = Stream(HOST)

    def init(self) -> None:
        self.initialised = True

    def device_count(self) -> int:
        return self.devices if self.initialised else 3

    def set_device(self, device: torch.device) -> None:
        assert self.initialised

    def current_device(self) -> int:
        return 0

    def get_device_properties(self, device: torch.device | None = None) -> SimpleNamespace:
        return SimpleNamespace(name="Host", device_id=0x64A0, total_memory=self._total(), gpu_subslice_count=8)

    def synchronize(self, device: torch.device | None = None) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def memory_allocated(self, device: torch.device | None = None) -> int:
        return host_resources.resident_memory()[0]

    def max_memory_allocated(self, device: torch.device | None = None) -> int:
        return host_resources.resident_memory()[1]

    def memory_reserved(self, device: torch.device | None = None) -> int:
        return host_resources.resident_memory()[0]

    def reset_peak_memory_stats(self, device: torch.device | None = None) -> None:
        host_resources.reset_peak_resident_memory()

    def mem_get_info(self, device: torch.device | None = None) -> tuple[int, int]:
        if not self.reports_free:
            raise RuntimeError(NOT_TOLD)
        return min(host_resources.memory_free(), self._total()), self._total()

    def _total(self) -> int:
        return self.memory_bytes or host_resources.memory_total()

    def manual_seed(self, seed: int) -> None:
        pass

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return self.current

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    @contextmanager
    def stream(self, stream: Stream) -> Any:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def graph_pool_handle(self) -> tuple[int, int]:
        return (0, 1)

    @contextmanager
    def graph(self, xpu_graph: XPUGraph, pool: Any = None, stream: Stream | None = None) -> Any:
        recorder, before, self.current = host_graphs._Recorder(), self.current, Stream(HOST)
        try:
            with recorder, ForbidSynchronizingOps():
                yield
        except AssertionError as e:  # the capture's stream stays current, like in torch
            raise RuntimeError(f"wait method cannot be used for a queue that records a graph\n{e}") from None
        self.current = before
        xpu_graph.calls = [call for call in recorder.calls if call.computes]
        for call in xpu_graph.calls:  # a capture computes nothing; the first replay computes the results
            if not call.works_in_place:
                for made in call.results:
                    made.fill_(torch.nan if made.is_floating_point() else 101)


XPU = FakeXpuModule()


class HostedModule(XpuModule):
    """The platform's DeviceModule over the replacement."""

    @property
    def api(self) -> FakeXpuModule:
        return XPU

    def device(self, index: int) -> torch.device:
        return HOST

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)


HOSTED = HostedModule()

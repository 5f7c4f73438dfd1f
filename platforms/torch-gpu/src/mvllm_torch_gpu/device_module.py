"""DeviceModule: torch's module for a type of device (`torch.cuda`), and how such modules differ.

Torch's modules for devices are made after one pattern: streams, events, the allocator's figures and seeds have the same
names in all of them. What is written against one `DeviceModule` runs on each. What differs is said here, in methods
that a maker's package overrides: the class of graphs, whether waits can be forbidden, who knows how much is free.

Making one imports no torch and asks nobody anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class DeviceModule:
    """The module of one type of device; by default the one that has CUDA's and HIP's devices.

    Attributes:
        type: Of torch's device, and the module's name in torch.
    """

    type = "cuda"

    @property
    def api(self) -> Any:
        """Torch's module."""
        import torch

        return getattr(torch, self.type)

    def device(self, index: int) -> torch.device:
        """Torch's name of the device that the module counts as `index`."""
        import torch

        return torch.device(self.type, index)

    def device_count(self) -> int:
        """Devices that this process sees."""
        return int(self.api.device_count())

    def free_and_total(self, device: torch.device) -> tuple[int | None, int]:
        """Bytes that nobody holds, None where the driver does not tell, and those that there are.

        Raises:
            RuntimeError: The device does not answer.
        """
        free, total = self.api.mem_get_info(device)
        return int(free), int(total)

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A page-locked tensor on the host."""
        import torch

        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def new_graph(self) -> Any:
        """An empty graph."""
        return self.api.CUDAGraph()

    def captures(self, graph: Any, pool: Any) -> AbstractContextManager[Any]:
        """A context whose work is recorded in a graph, which takes its memory from `pool`."""
        # Other threads (NCCL's watchdog is one) may ask the driver for things that a capture must not.
        context: AbstractContextManager[Any] = self.api.graph(graph, pool=pool, capture_error_mode="thread_local")
        return context

    @contextmanager
    def forbids_waiting(self) -> Iterator[None]:
        """A context in which work that makes the host wait for the device fails.

        Raises:
            RuntimeError: It has waited; the message has "synchroniz" in it.
        """
        before = self.api.get_sync_debug_mode()
        self.api.set_sync_debug_mode("error")
        try:
            yield
        finally:
            self.api.set_sync_debug_mode(before)


CUDA = DeviceModule()
"""Torch's own name for it serves HIP, too."""

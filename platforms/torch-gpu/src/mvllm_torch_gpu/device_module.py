"""DeviceModule: torch's module for a type of device (`torch.cuda`), and how such modules differ.

Torch's modules for devices have one structure: streams, events, memory statistics and seeds have the same names in all
of them, so code written against a `DeviceModule` runs on each. Differences are methods that a vendor's package
overrides: the class of graphs, whether synchronization can be forbidden, how free memory is read.

Creating a DeviceModule neither imports torch nor accesses a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class DeviceModule:
    """Torch's module for one type of device; by default `torch.cuda`, for CUDA and HIP.

    Attributes:
        type: Torch's device type, which is also the module's name in torch.
    """

    type = "cuda"

    @property
    def api(self) -> Any:
        """Torch's module."""
        import torch

        return getattr(torch, self.type)

    def device(self, index: int) -> torch.device:
        """The torch.device with number `index`."""
        import torch

        return torch.device(self.type, index)

    def device_count(self) -> int:
        """Devices that this process sees."""
        return int(self.api.device_count())

    def free_and_total(self, device: torch.device) -> tuple[int | None, int]:
        """Free bytes (None if the driver does not report them) and total bytes.

        Raises:
            RuntimeError: The device does not answer.
        """
        free, total = self.api.mem_get_info(device)
        return int(free), int(total)

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A page-locked tensor on the host."""
        import torch

        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def empty_host_cache(self) -> None:
        """Returns freed host buffers, for example of weights that have slept, to the system; older torch keeps them."""
        import torch

        accelerator = torch.accelerator  # noqa: TID251 the runtime's module, through which others reach the device
        empty = getattr(accelerator, "empty_host_cache", None)
        if empty is not None and accelerator.is_available():
            empty()

    def new_graph(self) -> Any:
        """An empty graph."""
        return self.api.CUDAGraph()

    def captures(self, graph: Any, pool: Any) -> AbstractContextManager[Any]:
        """A context whose work is captured in a graph, with memory from `pool`."""
        # Other threads (NCCL's watchdog, for example) may make driver calls that are illegal in a capture.
        context: AbstractContextManager[Any] = self.api.graph(graph, pool=pool, capture_error_mode="thread_local")
        return context

    @contextmanager
    def forbids_waiting(self) -> Iterator[None]:
        """A context in which operations that wait for the device fail.

        Raises:
            RuntimeError: An operation has waited; the message contains "synchroniz".
        """
        with self._sync_debug_mode("error"):
            yield

    @contextmanager
    def allows_waiting(self) -> Iterator[None]:
        """A context inside of `forbids_waiting` in which operations may wait for the device."""
        with self._sync_debug_mode("default"):
            yield

    @contextmanager
    def _sync_debug_mode(self, mode: str) -> Iterator[None]:
        before = self.api.get_sync_debug_mode()
        self.api.set_sync_debug_mode(mode)
        try:
            yield
        finally:
            self.api.set_sync_debug_mode(before)


CUDA = DeviceModule()
"""torch.cuda, which torch's build for ROCm uses for HIP as well."""

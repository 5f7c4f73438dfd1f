"""One device with torch_tpu, bound to a worker.

Operations are submitted one by one, in order, and the host does not wait for them. Memory statistics are torch's, from
XLA's allocator; XLA's CPU device has none, and the host's are used there.

Run on XLA's CPU device only; not run on hardware.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from mvllm.plugin_api import DeviceRuntime, HostCopy, MemoryInfo, PlatformError, WorkerContext, get_logger
from mvllm_tpu import host_memory, xla_devices

logger = get_logger("mvllm.tpu.runtime")


class EagerCopy:
    """A copy to the host, made when its value is read.

    Args:
        tensor: On the device; no other code writes to it.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._host: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """Waits for the device and returns the host tensor."""
        if self._host is None:
            assert self._tensor is not None
            self._host, self._tensor = self._tensor.cpu(), None
        return self._host


class EagerRuntime(DeviceRuntime):
    """Runtime of the device that this process opens.

    Raises:
        PlatformError: torch_tpu opens no device.
    """

    def __init__(self, ctx: WorkerContext) -> None:
        self._on_host = xla_devices.find().on_host
        try:
            self.device = _open(self._on_host)
        except (ImportError, RuntimeError) as e:
            raise PlatformError(
                f"torch_tpu opens no device for rank {ctx.rank}: {_first_line(e)}. Run: mvllm doctor --platform tpu"
            ) from e
        self.seed(ctx.seed)

    def synchronize(self) -> None:
        _accelerator().synchronize()

    def memory(self) -> MemoryInfo:
        self.synchronize()
        if self._on_host:
            used, peak = host_memory.resident()
            return MemoryInfo(host_memory.total(), host_memory.free(), used, peak)
        accelerator = _accelerator()
        free, total = accelerator.get_memory_info()
        return MemoryInfo(total, free, accelerator.memory_allocated(), accelerator.max_memory_allocated())

    def reset_peak_memory(self) -> None:
        self.synchronize()
        if self._on_host:
            host_memory.reset_peak()
        else:
            _accelerator().reset_peak_memory_stats()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        require_room(math.prod(shape) * dtype.itemsize, self.device, f"A tensor of {list(shape)}, {dtype},")
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        return host.to(self.device)

    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        return EagerCopy(tensor.clone())  # runs in order on the device, before later writes to the tensor

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)  # seeds this device's generators, too

    def health(self) -> None:
        try:
            self.synchronize()
        except RuntimeError as e:
            raise PlatformError(f"The device {self.device} does not answer: {_first_line(e)}.") from e

    def shutdown(self) -> None:
        try:
            self.synchronize()
        except RuntimeError as e:  # the device has failed
            logger.warning("Shutdown of the device %s failed: %s", self.device, _first_line(e))

    def num_compilations(self) -> int:
        """Number of programs that XLA has compiled in this process, of single operations and from torch.compile."""
        from torch_tpu._internal.device import _device_ops_backend

        return int(_device_ops_backend._get_cache_misses())


def require_room(size: int, device: torch.device, what: str) -> None:
    """Checks for free memory before an allocation, because the host's system would kill the process.

    Raises:
        MemoryError: There are fewer free bytes than `size`.
    """
    free = host_memory.free() if xla_devices.find().on_host else int(_accelerator().get_memory_info()[0])
    if size > free:
        raise MemoryError(f"{what} takes {size / 2**30:.2f} GiB; {free / 2**30:.2f} GiB are free on {device}.")


def _open(on_host: bool) -> torch.device:
    """Loads the library and registers its device with torch."""
    from torch_tpu import _loader

    _loader.load()
    if on_host:
        _loader._init_device("tpu")  # `load` counts chips on the PCI bus, where XLA's CPU device is missing
    return torch.device("tpu", torch.empty(0, device="tpu").device.index)


def _accelerator() -> Any:
    return torch.accelerator  # noqa: TID251 this is the runtime through which others reach the device


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

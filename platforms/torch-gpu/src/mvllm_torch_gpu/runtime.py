"""TorchGpuRuntime: one device, bound to a worker.

All work is submitted to the current stream and runs in that order. Copies use page-locked memory on the host, so the
host waits in neither direction: a copy to the host is done when the event after it is reached, and the host waits for
that event when it reads the values.

    device   step N │ tokens of N to the host ──event │ step N + 1 ...
    host     submits N, the copy, N + 1 ...           └> `wait` returns
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch

from mvllm.plugin_api import DeviceRuntime, Event, HostCopy, MemoryInfo, PlatformError, WorkerContext, get_logger
from mvllm_torch_gpu import memory
from mvllm_torch_gpu.device_module import CUDA, DeviceModule
from mvllm_torch_gpu.message_text import first_line
from mvllm_torch_gpu.out_of_memory import is_out_of_memory

logger = get_logger("mvllm.torch_gpu.runtime")

_LESS = "Lower --memory-utilization, or take memory back from other programs."


class DeviceEvent:
    """A point in a stream's order of work.

    Args:
        event: Torch's event.
    """

    def __init__(self, event: Any) -> None:
        self._event = event

    def record(self) -> None:
        """Sets the point after all work submitted so far to the current stream."""
        self._event.record()

    def wait(self) -> None:
        """Makes later work of the current stream start after the point."""
        self._event.wait()

    def synchronize(self) -> None:
        """Blocks the host until the point is reached."""
        self._event.synchronize()


class PendingCopy:
    """An asynchronous copy to the host.

    Args:
        tensor: Its destination.
        done: Event recorded after it.
    """

    def __init__(self, tensor: torch.Tensor, done: Any) -> None:
        self._tensor = tensor
        self._done = done

    def wait(self) -> torch.Tensor:
        """Waits for the copy and returns the host tensor."""
        self._done.synchronize()
        return self._tensor


class TorchGpuRuntime(DeviceRuntime):
    """Runtime of the visible device with number `local_rank`. Subclasses add what torch does not provide.

    Attributes:
        library: Name of the library that shows devices to a process, for messages.
        after_failure: Hint for a device that does not answer.
        others_counted: Torch's free bytes exclude memory of other processes.
        module: Torch's module for such devices.

    Raises:
        PlatformError: There is no such device, it cannot be used, or it cannot be opened.
    """

    library: ClassVar[str]
    after_failure: ClassVar[str]
    others_counted: ClassVar[bool] = True
    module: ClassVar[DeviceModule] = CUDA

    def __init__(self, ctx: WorkerContext, *, unified: bool) -> None:
        self.check_build()
        count = self.module.device_count()
        if ctx.local_rank >= count:
            raise PlatformError(too_few_devices(ctx, count, self.library, self.visibility_variables()))
        driver = self.driver_memory(ctx.local_rank)
        free_before = driver.free()
        self.device = self.module.device(ctx.local_rank)
        try:
            self.module.api.set_device(self.device)
            torch.zeros(1, device=self.device)  # creates the context, or raises
            properties = self.module.api.get_device_properties(self.device)
        except RuntimeError as e:
            raise PlatformError(
                f"The device {self.device} cannot be opened: {first_line(e)}. {self.after_failure}"
            ) from e
        if refusal := self.refusal(properties):
            raise PlatformError(f"{properties.name} ({self.device}) {refusal}")
        free_after, _ = self.module.free_and_total(self.device)
        bound_bytes = 0 if free_before is None or free_after is None else max(0, free_before - free_after)
        self._memory = memory.DeviceMemory(
            self.device,
            driver,
            bound_bytes,
            unified=unified,
            others_counted=self.others_counted,
            module=self.module,
        )
        self._side = self.module.api.Stream(self.device)
        self._open = True
        self.seed(ctx.seed)
        logger.info("Rank %d: %s, %s.", ctx.rank, properties.name, self._memory.stats().explain())

    @abstractmethod
    def check_build(self) -> None:
        """Checks that the loaded torch supports such devices.

        Raises:
            PlatformError: It was built for other devices.
        """

    @abstractmethod
    def visibility_variables(self) -> str:
        """The environment variables that limit the visible devices, for messages; empty without any."""

    @abstractmethod
    def driver_memory(self, index: int) -> memory.DriverMemory:
        """The driver's view of the device that torch numbers `index`."""

    @abstractmethod
    def refusal(self, properties: Any) -> str | None:
        """Why a device with these torch properties cannot be used, and what to do; None if it can."""

    def bind_thread(self) -> None:
        self.module.api.set_device(self.device)

    def synchronize(self) -> None:
        self.module.api.synchronize(self.device)

    def memory(self) -> MemoryInfo:
        return self._memory.stats().as_info()

    def reset_peak_memory(self) -> None:
        self.module.api.reset_peak_memory_stats(self.device)

    def release_cached_memory(self) -> None:
        self.module.api.empty_cache()
        self.module.empty_host_cache()

    def is_out_of_memory(self, error: Exception) -> bool:
        return super().is_out_of_memory(error) or is_out_of_memory(error)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        try:
            return torch.empty(shape, dtype=dtype, device=self.device)
        except RuntimeError as e:
            size = math.prod(shape) * dtype.itemsize
            what = f"A tensor of {size / 2**30:.2f} GiB ({list(shape)}, {dtype})"
            raise MemoryError(memory.not_enough(what, self._memory.stats(), _LESS)) from e

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.module.host_buffer(shape, dtype)

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        return host.to(self.device, non_blocking=True)

    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        host = self.module.host_buffer(tuple(tensor.shape), tensor.dtype)
        host.copy_(tensor, non_blocking=True)
        done = self.module.api.Event()
        done.record()
        return PendingCopy(host, done)

    def event(self) -> Event:
        return DeviceEvent(self.module.api.Event())

    def stream(self) -> AbstractContextManager[None]:
        return self._submitting_to(self._side)

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.module.api.manual_seed(seed)

    def health(self) -> None:
        try:
            self.module.api.current_stream(self.device).query()  # any earlier failure of the device shows here
            self.module.free_and_total(self.device)
        except RuntimeError as e:
            raise PlatformError(
                f"The device {self.device} does not answer: {first_line(e)}. {self.after_failure}"
            ) from e

    def shutdown(self) -> None:
        if not self._open:
            return
        self._open = False
        try:
            self.module.api.synchronize(self.device)
            self.module.api.empty_cache()
        except RuntimeError as e:  # the device has failed
            logger.warning("Shutdown of the device %s failed: %s", self.device, first_line(e))

    @contextmanager
    def _submitting_to(self, stream: Any) -> Iterator[None]:
        """Submits work to another stream, where it runs after the current stream's work so far."""
        api = self.module.api
        stream.wait_stream(api.current_stream(self.device))
        with api.stream(stream):
            yield


def too_few_devices(ctx: WorkerContext, count: int, library: str, shown: str) -> str:
    """Error text of a worker without a device."""
    seen = f" ({shown})" if shown else ""
    return (
        f"Rank {ctx.rank} is worker {ctx.local_rank} of this machine and needs a device of its own, but {library} "
        f"shows {count}{seen}. Use fewer ranks (--tensor-parallel-size, --pipeline-parallel-size, "
        f"--data-parallel-size), or make more devices visible."
    )

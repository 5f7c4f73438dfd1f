"""The interface of a bound device: memory, copies, events and health."""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from mvllm.contract import Phase, phase
from mvllm.errors import PlatformError

if TYPE_CHECKING:
    import numpy as np
    import torch


@phase(Phase.WORKER)
@dataclass(frozen=True)
class MemoryInfo:
    """Bytes on the device; of a worker that drives several devices, on all of them together.

    Attributes:
        total: Physical memory.
        free: Bytes that can be allocated now, given all processes.
        used_by_me: Bytes that this process holds.
        peak_by_me: Maximum that this process held since `reset_peak_memory`.
    """

    total: int
    free: int
    used_by_me: int
    peak_by_me: int


@phase(Phase.WORKER)
class HostCopy(Protocol):
    """An asynchronous copy from device to host. Used from the worker's thread."""

    def wait(self) -> torch.Tensor:
        """Blocks until the copy is done and returns the host tensor. May be called again."""


@phase(Phase.WORKER)
class FinishedHostCopy:
    """A HostCopy that is already complete.

    Args:
        tensor: The host tensor; the copy's result.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> torch.Tensor:
        """The host tensor, without waiting."""
        return self._tensor


@phase(Phase.WORKER)
class Event(Protocol):
    """A point in the order of work of a stream. Used from the worker's thread."""

    def record(self) -> None:
        """Records the point after all work submitted so far to the current stream."""

    def wait(self) -> None:
        """Makes later work of the current stream start after the point; the host does not wait."""

    def synchronize(self) -> None:
        """Blocks the host until the point is reached."""


@phase(Phase.WORKER)
class NullEvent:
    """The event of a device whose calls are synchronous."""

    def record(self) -> None:
        """Does nothing."""

    def wait(self) -> None:
        """Does nothing."""

    def synchronize(self) -> None:
        """Does nothing."""


@phase(Phase.WORKER)
class DeviceRuntime(ABC):
    """A bound device: memory, copies, ordering, health.

    Every method is called from the worker's thread. One instance per worker, returned by `Platform.init_device`.
    A worker in the caller's process has no thread of its own: it is called in several, one at a time, see
    `bind_thread`.

    Where a worker drives several devices, core treats them as one device: it computes with whole tensors and states for
    each weight how the devices share it (`place`). The platform divides the work and communicates between the devices,
    for instance with a compiler that derives both from the placement of the weights.

    Attributes:
        device: A `device=` argument for torch. Core does not interpret it.
    """

    device: torch.device

    def bind_thread(self) -> None:
        """Sets what the device's libraries keep for each thread: the current device, the number of compute threads.

        Called when the worker is called in another thread than before. The thread that bound the device is not told.
        Default: nothing.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Returns when all work submitted so far is done."""

    @abstractmethod
    def memory(self) -> MemoryInfo:
        """Current memory use, in bytes."""

    def reset_peak_memory(self) -> None:
        """Resets `peak_by_me` to `used_by_me`."""

    def release_cached_memory(self) -> None:
        """Returns memory that an allocator caches to the device."""

    def is_out_of_memory(self, error: Exception) -> bool:
        """Whether an error that a step raised is an out-of-memory error.

        The requests of such a step end with an error, and the engine continues. Default: MemoryError,
        torch.OutOfMemoryError, and the RuntimeError that torch raises when the host has no memory. A device whose
        allocator raises other errors overrides this.
        """
        import torch

        return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
            type(error) is RuntimeError and _without_numbers(error) == _host_out_of_memory_message()
        )

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor on the device.

        Raises:
            MemoryError: It does not fit.
        """

    @abstractmethod
    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A host tensor from which `to_device` copies fast (page-locked where that helps)."""

    @abstractmethod
    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        """The same values on the device, ordered before later work.

        The caller may change `host` only when an event recorded after this call has been reached, or after the next
        `synchronize` or `to_host(...).wait()`. A device that shares the host's memory may return `host` itself.
        """

    @abstractmethod
    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        """Starts copying `tensor` to the host, after the work submitted so far.

        The caller may drop `tensor` at once, but changes it only after the copy is done.
        """

    def from_numpy(self, array: np.ndarray) -> torch.Tensor:
        """`to_device` for a NumPy array."""
        import torch

        return self.to_device(torch.from_numpy(array))

    def place(self, tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
        """The same tensor, sharded over the devices of this worker. Only where `WorkerContext.num_devices` is above 1.

        Args:
            tensor: On the device. It may be changed in place; core does not use it afterwards.
            dim: Each device gets an equal part along this dimension, in order; its size is a multiple of their number.
                With None each gets all of it.

        Raises:
            PlatformError: The platform does not support it. This is the default.
        """
        raise PlatformError(
            f"This worker drives several devices, but {type(self).__name__} does not implement `place`, which shards "
            "tensors over them. Set tensor_parallel_size=1, or use a platform version that does."
        )

    def parts(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """Host copies of the shard of a tensor that each device of this worker holds, in the order of the devices.

        For tests and diagnostics; may be slow. With one device: the whole tensor.
        """
        return [self.to_host(tensor).wait()]

    def event(self) -> Event:
        """A new event; a NullEvent where work runs in the order of calls."""
        return NullEvent()

    def stream(self) -> AbstractContextManager[None]:
        """A context in which work is submitted to a second stream.

        Optional: core does not call it. Default: a null context, for a device with one stream.
        """
        return nullcontext()

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seeds the device's random number generators."""

    def inference_mode(self) -> AbstractContextManager[object]:
        """The context in which core runs the model; nothing is recorded for gradients.

        Default: torch's inference mode. Tensors created outside of it are used inside: the weights and the KV cache. A
        device that does not support that returns `torch.no_grad()`.
        """
        import torch

        return torch.inference_mode()

    def step_mark(self) -> None:
        """Makes a lazy device run the operations that it has recorded.

        Core calls it after the model and at the end of a step, in the warm-up as in steps, so that both record the same
        programs between two calls.
        """

    def num_compilations(self) -> int | None:
        """Number of programs that the device's compiler has compiled in this process; None if they are not counted."""
        return None

    def end_warm_up(self) -> None:
        """Called once, after the warm-up.

        With `Capabilities.static_shapes`, the warm-up ran every shape that the engine's limits and ShapePolicy allow,
        so the platform may report a later compilation as a warning or an error.
        """

    def health(self) -> None:
        """Checks the device.

        Raises:
            PlatformError: The device does not respond; the message says what was found.
        """

    def shutdown(self) -> None:
        """Releases the device. Idempotent."""


@functools.cache
def _host_out_of_memory_message() -> str:
    """The message of torch's error for a host allocation that fails, without numbers.

    The error has no class of its own, and its text depends on the system, so this provokes one with a huge tensor.
    """
    import torch

    try:
        torch.empty((1 << 60,), dtype=torch.uint8)
    except RuntimeError as e:
        return _without_numbers(e)
    return ""


def _without_numbers(error: Exception) -> str:
    return re.sub(r"\d+", "", str(error))

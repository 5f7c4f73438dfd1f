"""One device, as the worker that owns it sees it."""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from mvllm.errors import PlatformError

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes on the device; of a worker that drives several devices, on all of them together. Phase: worker.

    Attributes:
        total: Physical memory.
        free: What could still be allocated now, other processes considered.
        used_by_me: What this process holds.
        peak_by_me: Most that this process held since `reset_peak_memory`.
    """

    total: int
    free: int
    used_by_me: int
    peak_by_me: int


class HostCopy(Protocol):
    """A copy from device to host under way. Phase: worker, from the worker's thread."""

    def wait(self) -> torch.Tensor:
        """Blocks until the copy is done and returns the host tensor. May be called again."""


class FinishedHostCopy:
    """A copy that was done when it was asked for. Phase: worker.

    Args:
        tensor: The host tensor; the copy's result.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> torch.Tensor:
        """The host tensor, at once."""
        return self._tensor


class Event(Protocol):
    """A point in a stream's order of work. Phase: worker, from the worker's thread."""

    def record(self) -> None:
        """Sets the point after all work submitted so far to the current stream."""

    def wait(self) -> None:
        """Makes later work of the current stream start after the point; the host does not wait."""

    def synchronize(self) -> None:
        """Blocks the host until the point is reached."""


class NullEvent:
    """The event of a device whose work is done when a call returns. Phase: worker."""

    def record(self) -> None:
        """Nothing to mark."""

    def wait(self) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class DeviceRuntime(ABC):
    """A bound device: memory, copies, ordering, health.

    Phase: worker; every method, from the worker's thread. One instance per worker, returned by `Platform.init_device`.

    Where a worker drives several devices, all of them are one device to core: it computes with whole tensors, and says
    of each weight how the devices share it (`place`). How the work is divided, and what the devices tell each other for
    that, is the platform's: its compiler's, for instance, which finds it from where the weights lie.

    Attributes:
        device: What torch accepts as `device=`; opaque to core.
    """

    device: torch.device

    @abstractmethod
    def synchronize(self) -> None:
        """Returns when all work submitted so far is done."""

    @abstractmethod
    def memory(self) -> MemoryInfo:
        """Current figures, in bytes."""

    def reset_peak_memory(self) -> None:
        """Starts `peak_by_me` anew from `used_by_me`."""

    def release_cached_memory(self) -> None:
        """Gives memory that an allocator holds back to the device."""

    def is_out_of_memory(self, error: Exception) -> bool:
        """Whether an error that a step has raised says that there was no memory for it.

        The requests of such a step end with an error, and the engine goes on. By default MemoryError, what torch raises
        for devices with an allocator of its own, and what it raises where the host has no memory; a device whose
        allocator has errors of another kind says so.
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
        """A host tensor that `to_device` copies from fast (page-locked where that helps)."""

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
        """The same tensor, spread over the devices of this worker. Only where `WorkerContext.num_devices` is above 1.

        Args:
            tensor: On the device. It may be changed in place; core drops it soon.
            dim: Each device gets an equal part along this dimension, in order; its size is a multiple of their number.
                With None each gets all of it.

        Raises:
            PlatformError: The platform cannot spread tensors. This is the default.
        """
        raise PlatformError(
            f"This worker drives several devices, but {type(self).__name__} does not implement `place`, which spreads "
            "tensors over them. Set tensor_parallel_size=1, or use a platform version that does."
        )

    def parts(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """What each device of this worker holds of a tensor on the device, on the host, in the order of the devices.

        For tests and diagnosis; may be slow. Of one device: all of it.
        """
        return [self.to_host(tensor).wait()]

    def event(self) -> Event:
        """A new event; the null event where order of work equals order of calls."""
        return NullEvent()

    def stream(self) -> AbstractContextManager[None]:
        """A context in which work is submitted to a second stream.

        Optional: core does not call it. Default: a null context, for a device with one stream.
        """
        return nullcontext()

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seeds the device's generators."""

    def inference_mode(self) -> AbstractContextManager[object]:
        """A context in which core runs the model, and nothing is recorded for gradients.

        Default: torch's inference mode. Tensors that were made outside of it are used within: the weights and the KV
        cache. A device whose tensors cannot be used so gives `torch.no_grad()`.
        """
        import torch

        return torch.inference_mode()

    def step_mark(self) -> None:
        """Ends a part of the work: a lazy device runs what it has recorded.

        Core calls it behind the model, and at the end of a step; in the warm-up as in steps, so that what lies between
        two calls is the same there.
        """

    def num_compilations(self) -> int | None:
        """Programs that the device's compiler has made in this process so far; None where nobody counts them."""
        return None

    def end_warm_up(self) -> None:
        """Says that the warm-up is over; once.

        Where `Capabilities.static_shapes`, its steps had every shape that the engine's limits and ShapePolicy allow: a
        compilation later on is worth a warning, or an error.
        """

    def health(self) -> None:
        """Returns if the device answers.

        Raises:
            PlatformError: It does not; the message says what was found.
        """

    def shutdown(self) -> None:
        """Releases the device. Idempotent."""


@functools.cache
def _host_out_of_memory_message() -> str:
    """What torch says where the host has no memory for a tensor. The error has no class of its own, and its text is
    another one on each system, so one is asked for that no host has room for.
    """
    import torch

    try:
        torch.empty((1 << 60,), dtype=torch.uint8)
    except RuntimeError as e:
        return _without_numbers(e)
    return ""


def _without_numbers(error: Exception) -> str:
    return re.sub(r"\d+", "", str(error))

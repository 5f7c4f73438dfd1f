"""Staging buffers: host buffers from which a step copies to the device.

Two sets alternate, so that the host can fill the buffers of step N + 1 while step N runs. Before step N + 2 overwrites
the buffers of step N, it waits for the end of step N, which has nearly always passed by then.

    host      fill A   launch 0   fill B   launch 1   (0 done?) fill A   launch 2
    device             [ 0 reads A           ][ 1 reads B               ][ 2 reads A
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from mvllm.platform.runtime import DeviceRuntime, Event


@dataclass
class _BufferSet:
    """The buffers of every other step, and the end of the last step that used them."""

    buffers: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)
    end: Event | None = None


class StagingBuffers:
    """The staging buffers of one worker.

    Args:
        runtime: The device.

    Attributes:
        turn: The set of this step, 0 or 1.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._sets = (_BufferSet(), _BufferSet())
        self.turn = 0

    def reserve(self, size: int, dtype: torch.dtype) -> None:
        """Allocates buffers of `size` elements, the maximum of a step."""
        for each in self._sets:
            each.buffers[dtype] = self._runtime.host_buffer((size,), dtype)

    def begin_step(self) -> None:
        """Switches to the other set, after the step that used it last has ended on the device."""
        self.turn ^= 1
        end = self._sets[self.turn].end
        if end is not None:
            end.synchronize()

    def end_step(self) -> None:
        """Records the event after all work that reads this step's buffers."""
        current = self._sets[self.turn]
        if current.end is None:
            current.end = self._runtime.event()
        current.end.record()

    def buffer(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """A host tensor of at least `size` elements, filled once per step and passed to `copy_to_device`."""
        buffers = self._sets[self.turn].buffers
        found = buffers.get(dtype)
        if found is None or len(found) < size:
            # Powers of two, so that slowly growing sizes do not allocate a new buffer each time.
            found = buffers[dtype] = self._runtime.host_buffer((1 << (size - 1).bit_length(),), dtype)
        return found

    def copy_to_device(self, host: torch.Tensor) -> torch.Tensor:
        """Copies a buffer of this step, or its leading part, to the device."""
        return self._runtime.to_device(host)

"""Memory of one device as the kernel reports it."""

from __future__ import annotations

from mvllm_xpu import topology
from mvllm_xpu.topology import XpuDevice


class FdinfoDriverMemory:
    """DriverMemory of one XPU device, from the kernel's files.

    Args:
        device: The device; None if it is unknown.
    """

    def __init__(self, device: XpuDevice | None) -> None:
        self._device = device

    def free(self) -> int | None:
        """None: the kernel reports free memory to root only."""
        return None

    def held_by_this_process(self) -> int | None:
        """Bytes of a card's own memory that this process holds; None if the kernel does not report them.

        An integrated GPU has no own memory, and its use of the host's memory is not reported separately.
        """
        if self._device is None or self._device.integrated:
            return None
        return topology.held_by_process(self._device.address)

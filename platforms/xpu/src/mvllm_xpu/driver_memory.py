"""Memory of one device as the kernel reports it."""

from __future__ import annotations

from mvllm_xpu import topology
from mvllm_xpu.topology import XpuDevice


class FdinfoDriverMemory:
    """A device's.

    Args:
        device: It; None where it cannot be worked out which one it is.
    """

    def __init__(self, device: XpuDevice | None) -> None:
        self._device = device

    def free(self) -> int | None:
        """The kernel tells nobody but the superuser."""
        return None

    def held_by_this_process(self) -> int | None:
        """Bytes of a card's own memory that this process holds; None where the kernel does not tell.

        A processor's GPU has none, and what is held of the host's memory is not told apart.
        """
        if self._device is None or self._device.integrated:
            return None
        return topology.held_by_process(self._device.address)

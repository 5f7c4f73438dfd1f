"""Memory of one device as the kernel driver reports it."""

from __future__ import annotations

import os
from pathlib import Path

from mvllm_rocm import topology
from mvllm_rocm.topology import RocmDevice

_OUTERMOST = 0xEFFFFFFC
"""Number that the kernel gives to its first namespace of processes, the one in which the driver counts."""


class SysfsDriverMemory:
    """A device's.

    Args:
        device: It; None where it cannot be worked out which one it is.
        root: As in `topology.read_inventory`.
    """

    def __init__(self, device: RocmDevice | None, root: Path | None = None) -> None:
        self._device = device
        self._root = root

    def free(self) -> int | None:
        """Bytes that nobody holds, as of now; None where the driver does not tell: then the host has them."""
        if self._device is None or self._device.memory_bytes is None:
            return None
        used = topology.used_bytes(self._device)
        return None if used is None else max(0, self._device.memory_bytes - used)

    def held_by_this_process(self) -> int | None:
        """Bytes that this process holds; None where the driver knows it by another number (in a container)."""
        if self._device is None or not driver_shares_pid_namespace():
            return None
        return topology.bytes_of_process(self._device, os.getpid(), self._root)


def driver_shares_pid_namespace(namespace: Path = Path("/proc/self/ns/pid")) -> bool:
    """Whether the driver knows this process by the number that it knows itself by."""
    try:
        return namespace.stat().st_ino == _OUTERMOST
    except OSError:
        return False

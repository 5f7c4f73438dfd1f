"""Memory of one device as the kernel driver reports it."""

from __future__ import annotations

import os
from pathlib import Path

from mvllm_rocm import topology
from mvllm_rocm.topology import RocmDevice

_OUTERMOST = 0xEFFFFFFC
"""Inode of the kernel's initial pid namespace, whose pids the driver uses."""


class SysfsDriverMemory:
    """DriverMemory of one ROCm device, from the driver's files.

    Args:
        device: The device; None if it is unknown.
        root: Like that of `topology.read_inventory`.
    """

    def __init__(self, device: RocmDevice | None, root: Path | None = None) -> None:
        self._device = device
        self._root = root

    def free(self) -> int | None:
        """Free bytes; None if the driver does not report them, because the device uses the host's memory."""
        if self._device is None or self._device.memory_bytes is None:
            return None
        used = topology.used_bytes(self._device)
        return None if used is None else max(0, self._device.memory_bytes - used)

    def held_by_this_process(self) -> int | None:
        """Bytes that this process holds; None if its pid differs from the driver's (in a container)."""
        if self._device is None or not driver_shares_pid_namespace():
            return None
        return topology.bytes_of_process(self._device, os.getpid(), self._root)


def driver_shares_pid_namespace(namespace: Path = Path("/proc/self/ns/pid")) -> bool:
    """Whether the driver and this process use the same pids."""
    try:
        return namespace.stat().st_ino == _OUTERMOST
    except OSError:
        return False

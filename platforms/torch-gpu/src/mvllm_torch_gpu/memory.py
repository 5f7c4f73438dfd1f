"""Memory accounting of one device that other processes may use too, and the error text when memory is short.

    total ├─ others ─┤├─ outside ─┤├──── reserved by torch's allocator ────┤├──── free in the driver ────┤
                                    ├─ allocated ─┤├─ cached: free to us ─┤

*Outside* is memory of this process outside of torch's allocator: its context, loaded kernels, buffers of collectives.
`DriverMemory` reports it if the driver can identify the process. In a container it may fail to; then the memory that
binding the device has used is taken instead. *Outside* separates our memory from that of other processes, which the
driver's free bytes alone cannot do.

On a device that uses the host's memory, the driver reports only unused memory as free, although the system can drop
file caches. There the host's available memory is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from mvllm.plugin_api import MemoryInfo
from mvllm_torch_gpu.device_module import CUDA, DeviceModule

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_GIB = 1 << 30


@dataclass(frozen=True)
class MemoryStats:
    """Memory of a device at one moment, in bytes, from the driver, torch's allocator and the host.

    Attributes:
        total, driver_free: Memory of the device.
        allocated, peak_allocated, reserved: Statistics of torch's allocator.
        outside: Held by this process outside of torch's allocator.
        host_free: Available memory of the host if the device uses it; else None.
    """

    total: int
    driver_free: int
    allocated: int
    peak_allocated: int
    reserved: int
    outside: int
    host_free: int | None = None

    @property
    def cached(self) -> int:
        """Reserved by torch's allocator and not allocated."""
        return max(0, self.reserved - self.allocated)

    @property
    def free(self) -> int:
        """Bytes that this process can still allocate."""
        untouched = self.driver_free if self.host_free is None else max(self.driver_free, self.host_free)
        return min(self.total, untouched + self.cached)

    @property
    def used_by_others(self) -> int:
        """Held by other processes; on a device that uses the host's memory, by the whole system."""
        return max(0, self.total - self.free - self.allocated - self.outside)

    def as_info(self) -> MemoryInfo:
        """Converted to the contract's MemoryInfo."""
        used, peak = self.allocated + self.outside, max(self.allocated, self.peak_allocated) + self.outside
        return MemoryInfo(total=self.total, free=self.free, used_by_me=used, peak_by_me=peak)

    def explain(self) -> str:
        """Text for an out-of-memory message."""
        return (
            f"{_gib(self.free)} of {_gib(self.total)} GiB are free; this process holds "
            f"{_gib(self.allocated + self.outside)} GiB, other processes hold {_gib(self.used_by_others)} GiB"
        )


class DriverMemory(Protocol):
    """The driver's view of one device, without a context on it."""

    def free(self) -> int | None:
        """Free bytes; None if the driver cannot tell."""

    def held_by_this_process(self) -> int | None:
        """Bytes that this process holds; None if the driver cannot tell."""


class DeviceMemory:
    """The memory of one bound device.

    Args:
        device: The device.
        driver: The driver's view of it.
        bound_bytes: Memory that binding the device has used.
        unified: The device uses the host's memory.
        others_counted: Torch's free bytes exclude memory of other processes; else the driver is asked as well.
        module: Torch's module for the device.
    """

    def __init__(
        self,
        device: torch.device,
        driver: DriverMemory,
        bound_bytes: int,
        *,
        unified: bool,
        others_counted: bool = True,
        module: DeviceModule = CUDA,
    ) -> None:
        self._device = device
        self._module = module
        self._driver = driver
        self._bound_bytes = bound_bytes
        self._unified = unified
        self._others_counted = others_counted

    def stats(self) -> MemoryStats:
        """Reads the current state."""
        api = self._module.api
        driver_free, total = self._module.free_and_total(self._device)
        reported = None if self._others_counted else self._driver.free()
        reserved = api.memory_reserved(self._device)
        mine = self._driver.held_by_this_process()
        # A value below torch's reserved memory is that of another process, with our pid outside of our container.
        outside = self._bound_bytes if mine is None or mine < reserved else mine - reserved
        if driver_free is None:  # only our own use is known; for unified memory, host_free is used
            driver_free = 0 if self._unified else max(0, total - reserved - outside)
        return MemoryStats(
            total=total,
            driver_free=driver_free if reported is None else min(driver_free, reported),
            allocated=api.memory_allocated(self._device),
            peak_allocated=api.max_memory_allocated(self._device),
            reserved=reserved,
            outside=outside,
            host_free=available_host_memory() if self._unified else None,
        )


def available_host_memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Bytes of the host's memory that programs can still allocate, within the limit of our control group."""
    found = 0
    for line in meminfo.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            found = int(rest.split()[0]) * 1024
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text()) - _file_cache(cgroup)
    except (OSError, ValueError):
        return found
    return found if limit == "max" else max(0, min(found, int(limit) - used))


def _file_cache(cgroup: Path) -> int:
    """Bytes of cached files (read weights) that a control group counts as used and drops on demand."""
    try:
        lines = (cgroup / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))


def not_enough(what: str, stats: MemoryStats, remedy: str) -> str:
    """Message of the error that `what` does not fit into memory."""
    return f"{what} does not fit on the device: {stats.explain()}. {remedy}"


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f}"

"""Whose bytes are whose on a device that others may use too, and what is said when there are not enough.

    total ├─ others ─┤├─ outside ─┤├──── reserved by torch's allocator ────┤├──── free in the driver ────┤
                                    ├─ allocated ─┤├─ cached: free to us ─┤

*Outside* is what this process holds beside torch's allocator: its context, loaded kernels, buffers of collectives. The
driver's `Books` know it where they see the process; from within a container they may not, and then it is what binding
the device has cost. Other tenants are told apart by that: the driver's free bytes alone would count theirs as ours.

A device that uses the host's memory has no figure of its own: its driver calls free what nobody has touched, though
the system would give up its file caches for us. There the host's available memory counts.
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
    """What driver, allocator and host say at one moment, in bytes.

    Attributes:
        total, driver_free: Of the device.
        allocated, peak_allocated, reserved: Of torch's allocator.
        outside: What this process holds beside it.
        host_free: Of the host, where the device uses its memory; else None.
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
        """What torch's allocator holds and nobody uses."""
        return max(0, self.reserved - self.allocated)

    @property
    def free(self) -> int:
        """What can still be allocated."""
        untouched = self.driver_free if self.host_free is None else max(self.driver_free, self.host_free)
        return min(self.total, untouched + self.cached)

    @property
    def used_by_others(self) -> int:
        """What is held by others; on a device that uses the host's memory, by the whole system."""
        return max(0, self.total - self.free - self.allocated - self.outside)

    def as_info(self) -> MemoryInfo:
        """The same in the contract's terms."""
        used, peak = self.allocated + self.outside, max(self.allocated, self.peak_allocated) + self.outside
        return MemoryInfo(total=self.total, free=self.free, used_by_me=used, peak_by_me=peak)

    def explain(self) -> str:
        """For people who lack memory."""
        return (
            f"{_gib(self.free)} of {_gib(self.total)} GiB are free; this process holds "
            f"{_gib(self.allocated + self.outside)} GiB, others {_gib(self.used_by_others)} GiB"
        )


class DriverMemory(Protocol):
    """What a driver says about one device, without a context on it."""

    def free(self) -> int | None:
        """Its free bytes; None where the driver cannot tell."""

    def held_by_this_process(self) -> int | None:
        """Bytes of it that this process holds; None where the driver cannot tell."""


class UnknownDriverMemory:
    """Those of a device that the driver does not show."""

    def free(self) -> None:
        """Nobody knows."""

    def held_by_this_process(self) -> None:
        """Nobody knows."""


class DeviceMemory:
    """The memory of one bound device.

    Args:
        device: It.
        books: What its driver says.
        bound_bytes: What binding it has cost.
        unified: It uses the host's memory.
        others_counted: What torch gives as free leaves out what others hold; else the books are asked, too.
        module: What drives the device.
    """

    def __init__(
        self,
        device: torch.device,
        books: DriverMemory,
        bound_bytes: int,
        *,
        unified: bool,
        others_counted: bool = True,
        module: DeviceModule = CUDA,
    ) -> None:
        self._device = device
        self._module = module
        self._books = books
        self._bound_bytes = bound_bytes
        self._unified = unified
        self._others_counted = others_counted

    def stats(self) -> MemoryStats:
        """The figures of now."""
        api = self._module.api
        driver_free, total = self._module.free_and_total(self._device)
        told = None if self._others_counted else self._books.free()
        reserved = api.memory_reserved(self._device)
        mine = self._books.held_by_this_process()
        # Less than torch holds is another process's: one that has our number outside of our container.
        outside = self._bound_bytes if mine is None or mine < reserved else mine - reserved
        if driver_free is None:  # then nobody but us is known to be there; of the host's memory the host knows
            driver_free = 0 if self._unified else max(0, total - reserved - outside)
        return MemoryStats(
            total=total,
            driver_free=driver_free if told is None else min(driver_free, told),
            allocated=api.memory_allocated(self._device),
            peak_allocated=api.max_memory_allocated(self._device),
            reserved=reserved,
            outside=outside,
            host_free=available_host_memory() if self._unified else None,
        )


def available_host_memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Bytes of the host's memory that programs can still have: what the system can give up, within our group."""
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
    """Bytes of files that a group counts as used, and gives up where programs want them: weights that were read."""
    try:
        lines = (cgroup / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))


def not_enough(what: str, figures: MemoryStats, remedy: str) -> str:
    """The one message about memory that `what` did not find."""
    return f"{what} does not fit on the device: {figures.explain()}. {remedy}"


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f}"

"""Cores, memory nodes and memory that this process may use. Read from /proc and /sys, never changed here.

Three things narrow what the hardware offers: the affinity mask that the process was started with, the CPU quota of its
control group, and the memory limit of its control group. All three are respected; a container sees its own share.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform as python_platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
SYS = Path("/sys")


# --------------------------------------------------------------------------------------------------------------- cores


@dataclass(frozen=True)
class Core:
    """One physical core: the first of its hardware threads that this process may run on.

    Attributes:
        cpu: Number of that hardware thread.
        node: Memory node that the core is nearest to.
    """

    cpu: int
    node: int


def allowed_cpus(pid: int = 0) -> list[int]:
    """Hardware threads that this process may run on, or that process `pid` may.

    Raises:
        OSError: There is no such process.
    """
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(pid))
    return list(range(os.cpu_count() or 1))


def physical_cores(cpus: Iterable[int] | None = None) -> list[Core]:
    """One entry per physical core of `cpus`, ordered by memory node and then by number; by default, of those allowed.

    A second hardware thread of a core adds nothing to arithmetic that already fills the core's vector units.
    """
    seen: set[tuple[str, ...]] = set()
    cores = []
    for cpu in sorted(allowed_cpus() if cpus is None else cpus):
        siblings = _read(SYS / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        identity = (siblings,) if siblings else (str(cpu), "alone")
        if identity not in seen:
            seen.add(identity)
            cores.append(Core(cpu=cpu, node=_node_of(cpu)))
    return sorted(cores, key=lambda core: (core.node, core.cpu))


def cpu_quota() -> float | None:
    """Cores' worth of time that the control group grants, or None where it grants all."""
    for folder in _cgroup_folders("cpu"):
        limit = _read(folder / "cpu.max").split()
        if len(limit) == 2 and limit[0] != "max":
            return int(limit[0]) / int(limit[1])
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota and period and int(quota) > 0:
            return int(quota) / int(period)
    return None


def threads_asked_for() -> int | None:
    """What the user set OMP_NUM_THREADS to, or None. The first number counts where it is a list."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdigit() and int(first) > 0 else None


def usable_threads() -> int:
    """Threads that a worker alone on this machine should compute with."""
    return threads_asked_for() or _within_quota(len(physical_cores()))


def num_cores_of_processes(pids: Iterable[int]) -> int:
    """Cores that these processes have together, within this one's quota."""
    cpus: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            cpus.update(allowed_cpus(pid))
    return _within_quota(len(physical_cores(cpus)))


@dataclass(frozen=True)
class CoreShare:
    """What one of several workers on this machine gets.

    Attributes:
        cpus: Hardware threads to run on, one per physical core.
        threads: Threads to compute with.
    """

    cpus: tuple[int, ...]
    threads: int


def core_share(local_rank: int, local_world_size: int) -> CoreShare:
    """Divides the cores among the workers of this machine, memory nodes kept whole where possible.

    Cores are ordered by node, so contiguous shares cross a node only if the shares do not divide it:

        2 nodes of 4 cores, 2 workers:   0000 | 1111        4 workers:   00 | 00 | 11 | 11

    More workers than cores share cores, in turn.
    """
    cores = [core.cpu for core in physical_cores()]
    if local_world_size > len(cores):
        cpus = [cores[local_rank % len(cores)]]
    else:
        begin = local_rank * len(cores) // local_world_size
        end = (local_rank + 1) * len(cores) // local_world_size
        cpus = cores[begin:end]
    granted = max(1, _within_quota(len(cores)) // local_world_size)
    threads = threads_asked_for() or min(len(cpus), granted)
    return CoreShare(cpus=tuple(cpus), threads=threads)


def _within_quota(cores: int) -> int:
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def _node_of(cpu: int) -> int:
    try:
        nodes = [entry.name for entry in (SYS / f"devices/system/cpu/cpu{cpu}").glob("node[0-9]*")]
    except OSError:
        nodes = []
    return int(nodes[0].removeprefix("node")) if nodes else 0


def processor_name() -> str:
    """The processor's product name."""
    for line in _read(PROC / "cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "Processor") and value.strip():
            return value.strip()
    return python_platform.processor() or python_platform.machine() or "unknown processor"


# -------------------------------------------------------------------------------------------------------------- memory


def memory_total() -> int:
    """Bytes that this process could ever use: installed memory, or the control group's limit where lower."""
    installed = _meminfo().get("MemTotal") or _installed_memory()
    return min([installed, *(limit for limit, _ in _cgroup_memory())])


def memory_free() -> int:
    """Bytes that could be allocated now without pushing anything out, all processes considered."""
    free = _meminfo().get("MemAvailable") or memory_total() // 2
    return max(0, min([free, *(limit - used for limit, used in _cgroup_memory())]))


def resident_memory() -> tuple[int, int]:
    """Bytes of this process in memory: now, and at most since `reset_peak_resident_memory`."""
    fields = _kilobyte_fields(_read(PROC / "self/status"))
    if "VmRSS" in fields:
        return fields["VmRSS"], max(fields.get("VmHWM", 0), fields["VmRSS"])
    import resource

    unit = 1 if python_platform.system() == "Darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return peak, peak


def reset_peak_resident_memory() -> bool:
    """Starts the peak anew from what is resident now. False where the system does not allow it."""
    try:
        (PROC / "self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _installed_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _meminfo() -> dict[str, int]:
    return _kilobyte_fields(_read(PROC / "meminfo"))


def _kilobyte_fields(text: str) -> dict[str, int]:
    """`Name:   123 kB` lines, in bytes."""
    fields = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) == 3 and words[2] == "kB":
            fields[words[0].rstrip(":")] = int(words[1]) * 1024
    return fields


def _cgroup_memory() -> list[tuple[int, int]]:
    """(limit, bytes in use that cannot be dropped) of each control group above this process that has a limit."""
    found = []
    for folder in _cgroup_folders("memory"):
        for limit_file, used_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _read(folder / limit_file), _read(folder / used_file)
            if limit.isdigit() and used.isdigit() and int(limit) < 1 << 60:
                found.append((int(limit), max(0, int(used) - _droppable(folder))))
    return found


def _droppable(folder: Path) -> int:
    """Bytes of cached files that the kernel drops before it refuses memory."""
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and value.isdigit():
            return int(value)
    return 0


def _cgroup_folders(controller: str) -> list[Path]:
    """Folders of this process's control group and of those above it, for either version of control groups."""
    root = SYS / "fs/cgroup"
    folders: list[Path] = []
    for line in _read(PROC / "self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controller if controllers else root
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            folders.append(folder)
            if folder == base:
                break
    folders.append(root)
    return list(dict.fromkeys(folders))


def _read(path: Path) -> str:
    """A small file's text without surrounding space; empty when it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""

"""Cores, NUMA nodes and memory that this process may use. Read from /proc and /sys, never changed here.

Three settings limit the use of the hardware: the affinity mask of the process, and the CPU quota and the memory limit
of its control group. All three are respected, so a container uses its own share. With nested control groups, the
lowest limit counts.
"""

from __future__ import annotations

import contextlib
import os
import platform as python_platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath

PROC = Path("/proc")
SYS = Path("/sys")


# --------------------------------------------------------------------------------------------------------------- cores


@dataclass(frozen=True)
class Core:
    """One physical core: the first of its hardware threads that this process may run on.

    Attributes:
        cpu: Number of that hardware thread.
        node: The core's NUMA node.
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
    """One entry per physical core of `cpus` (default: the allowed CPUs), ordered by NUMA node and then by number.

    A second hardware thread of a core does not speed up arithmetic that saturates the core's vector units.
    """
    seen: set[tuple[str, ...]] = set()
    cores = []
    for cpu in sorted(allowed_cpus() if cpus is None else cpus):
        key = _core_key(cpu)
        if key not in seen:
            seen.add(key)
            cores.append(Core(cpu=cpu, node=_node_of(cpu)))
    return sorted(cores, key=lambda core: (core.node, core.cpu))


def _core_key(cpu: int) -> tuple[str, ...]:
    """A key that is equal for all hardware threads of a physical core. Without topology data, each CPU is a core."""
    topology = SYS / f"devices/system/cpu/cpu{cpu}/topology"
    for name in ("thread_siblings_list", "core_cpus_list"):
        siblings = _read(topology / name)
        if siblings:
            return (siblings,)
    package, core = _read(topology / "physical_package_id"), _read(topology / "core_id")
    return (package, core, "core_id") if core.isdigit() else (str(cpu), "alone")


def cpu_quota() -> float | None:
    """CPU quota in cores: the lowest of the control group and its parents; None without a quota."""
    granted = []
    for folder in _cgroup_folders("cpu"):
        for limit in (
            _read(folder / "cpu.max").split(),
            [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")],
        ):
            if len(limit) == 2 and all(number.isdigit() and int(number) > 0 for number in limit):
                granted.append(int(limit[0]) / int(limit[1]))
    return min(granted, default=None)


def threads_asked_for() -> int | None:
    """The user's OMP_NUM_THREADS, or None. Of a list, the first number counts."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdigit() and int(first) > 0 else None


def usable_threads() -> int:
    """Number of compute threads of a worker that is alone on this machine."""
    return threads_asked_for() or _threads_within_quota(len(physical_cores()))


def num_cores_of_processes(pids: Iterable[int]) -> int:
    """Number of cores that these processes can use together at any time: one with a quota of 1.5 cores."""
    cpus: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            cpus.update(allowed_cpus(pid))
    cores, quota = len(physical_cores(cpus)), cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


@dataclass(frozen=True)
class CoreShare:
    """The cores and threads of one of several workers on this machine.

    Attributes:
        cpus: Hardware threads to run on, one per physical core.
        threads: Number of compute threads.
    """

    cpus: tuple[int, ...]
    threads: int


def core_share(local_rank: int, local_world_size: int) -> CoreShare:
    """Divides the cores among the workers of this machine, without splitting NUMA nodes if possible.

    Cores are ordered by node, so contiguous shares cross a node boundary only if the shares do not divide a node:

        2 nodes of 4 cores, 2 workers:   0000 | 1111        4 workers:   00 | 00 | 11 | 11

    If there are more workers than cores, workers share cores round-robin.
    """
    cores = [core.cpu for core in physical_cores()]
    if local_world_size > len(cores):
        cpus = [cores[local_rank % len(cores)]]
    else:
        begin = local_rank * len(cores) // local_world_size
        end = (local_rank + 1) * len(cores) // local_world_size
        cpus = cores[begin:end]
    granted = max(1, _threads_within_quota(len(cores)) // local_world_size)
    threads = threads_asked_for() or min(len(cpus), granted)
    return CoreShare(cpus=tuple(cpus), threads=threads)


def _threads_within_quota(cores: int) -> int:
    """Number of threads for the CPU quota, rounded half up.

    The system stops all threads of a group that has used its quota for the rest of the period (100 ms by default).
    With a quota of 1.5, two threads are stopped for a quarter of the time and still compute more than one thread.
    With 1.2, they would be stopped for two fifths, so one thread is used, and the rest of the quota is left to the
    engine's other threads.
    """
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota + 0.5)))


def describe_threads(threads: int, workers: int = 1, allowed: Iterable[int] | None = None) -> str:
    """Number of CPUs that a worker computes with, and why not all: '2 of 8 CPUs: cgroup quota 1.5'.

    Args:
        threads: Compute threads of the worker.
        workers: Workers that share this machine.
        allowed: Hardware threads that all workers may run on; by default those of this process.
    """
    allowed = allowed_cpus() if allowed is None else list(allowed)
    total, quota, cores = os.cpu_count() or 1, cpu_quota(), len(physical_cores(allowed))
    within = _threads_within_quota(cores)
    reasons = []
    if len(allowed) < total:
        reasons.append(f"the process may run on {len(allowed)}")
    if cores < len(allowed):
        reasons.append("one per physical core")
    if quota is not None and quota < cores:
        reasons.append(f"cgroup quota {quota:g}")
    if workers > 1:
        reasons.append(f"{workers} workers share them")
    if threads != max(1, within // workers):  # the platform also sets the variable, to this number
        requested = threads_asked_for()
        reasons = [f"OMP_NUM_THREADS={requested}" if requested == threads else "set in this process before the engine"]
    return f"{threads} of {total} CPUs" + (f": {', '.join(reasons)}" if reasons else "")


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
    """Memory limit of this process in bytes: installed memory, or the control group's limit if lower."""
    installed = _meminfo().get("MemTotal") or _installed_memory()
    return min([installed, *(limit for limit, _ in _cgroup_memory())])


def memory_free() -> int:
    """Bytes that can be allocated now without swapping, given the memory of all processes."""
    free = _meminfo().get("MemAvailable") or memory_total() // 2
    return max(0, min([free, *(limit - used for limit, used in _cgroup_memory())]))


def resident_memory() -> tuple[int, int]:
    """Resident memory of this process in bytes: current, and peak since `reset_peak_resident_memory`."""
    fields = _kilobyte_fields(_read(PROC / "self/status"))
    if "VmRSS" in fields:
        return fields["VmRSS"], max(fields.get("VmHWM", 0), fields["VmRSS"])
    import resource

    unit = 1 if python_platform.system() == "Darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return peak, peak


def reset_peak_resident_memory() -> bool:
    """Resets the peak to the current resident memory. False if the system does not allow it."""
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
                found.append((int(limit), max(0, int(used) - _cached_file_bytes(folder))))
    return found


def _cached_file_bytes(folder: Path) -> int:
    """Bytes of cached files, which the kernel drops before an allocation fails."""
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and value.isdigit():
            return int(value)
    return 0


def _cgroup_folders(controller: str) -> list[Path]:
    """Folders of this process's control group and its parents, for cgroup v1 and v2.

    In a container the mount starts at its own group; parent groups are not visible.
    """
    return _group_folders(SYS / "fs/cgroup", PROC / "self/mountinfo", _read(PROC / "self/cgroup"), controller)


@lru_cache(maxsize=8)
def _group_folders(root: Path, mountinfo: Path, membership: str, controller: str) -> list[Path]:
    """Cached, because a start needs them hundreds of times and mounts of control groups do not change.

    Args:
        root: Where control groups usually are.
        mountinfo: Lists the mounts.
        membership: Contents of `/proc/self/cgroup`.
        controller: `cpu` or `memory`.
    """
    folders: list[Path] = []
    for line in membership.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        usual = ("/", root / controller if controllers else root)
        for top, base in [*_cgroup_mounts(mountinfo, controller if controllers else None)] or [usual]:
            group = base
            if PurePosixPath(path).is_relative_to(top) and ".." not in path.split("/"):
                group = base / PurePosixPath(path).relative_to(top)
            for folder in (group, *group.parents):
                folders.append(folder)
                if folder == base:
                    break
    folders.append(root)
    return list(dict.fromkeys(folders))


def _cgroup_mounts(mountinfo: Path, controller: str | None) -> Iterator[tuple[str, Path]]:
    """(root control group, folder) of each mount of a cgroup v1 controller, or of cgroup v2 if it is None."""
    for line in _read(mountinfo).splitlines():
        mount, _, system = line.partition(" - ")
        where, what = mount.split(), system.split()
        if len(where) < 5 or len(what) < 3:
            continue
        right = what[0] == "cgroup2" if controller is None else what[0] == "cgroup" and controller in what[2].split(",")
        if right:
            yield where[3], Path(where[4].replace(r"\040", " "))


def _read(path: Path) -> str:
    """A small file's text without surrounding whitespace; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""

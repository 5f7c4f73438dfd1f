"""The host's free memory, within the limits of this process's control groups."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil  # type: ignore[import-untyped]

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def free_host_memory() -> int:
    """Bytes that this process and others can still allocate."""
    return min(psutil.virtual_memory().available, *_cgroup_headrooms(), 1 << 62)


def _cgroup_headrooms() -> list[int]:
    """The bytes left under the memory limits of this process's control groups, from its own up to the root."""
    headrooms = []
    with contextlib.suppress(OSError):
        for line in (PROC / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                root = CGROUPS / controllers
                group = root / path.lstrip("/")
                for folder in (group, *group.parents):
                    if folder.is_relative_to(root):
                        headrooms += _headroom(folder)
    return headrooms


def _headroom(folder: Path) -> list[int]:
    for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        with contextlib.suppress(OSError, ValueError):  # no limit reads "max"
            used = int((folder / usage).read_text()) - _droppable(folder)
            return [max(0, int((folder / limit).read_text()) - used)]
    return []


def _droppable(folder: Path) -> int:
    """Bytes of cached files, which count as used, but which the kernel drops before it refuses memory."""
    with contextlib.suppress(OSError, ValueError):
        fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))
    return 0

"""Shared memory for a whole engine, planned before any of it is claimed.

Rings may shrink: what does not fit a slot goes over a socket, so a smaller ring is slower and nothing worse. Slots are
halved first (the largest rings first), then their number, and when nothing can shrink any more the engine refuses.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil  # type: ignore[import-untyped]

from mvllm.executor.message_queue.errors import SharedMemoryError
from mvllm.executor.message_queue.ring_buffer import RingShape
from mvllm.executor.message_queue.shared_segment import anonymous_directory

MIN_SLOT_BYTES = 64 << 10
MIN_SLOTS = 3
PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
USABLE = 7 / 8  # the rest is for others: communication libraries use shared memory too


class SharedMemorySpace(msgspec.Struct, frozen=True):
    """How much shared memory there is.

    Attributes:
        free_bytes: What can be claimed.
        place: For people.
        remedy: How to get more.
    """

    free_bytes: int
    place: str
    remedy: str


def shared_memory_space(directory: str | None = None) -> SharedMemorySpace:
    """What is free in `directory`, or of anonymous memory for None (see SharedSegment.create)."""
    directory = directory or anonymous_directory()
    if directory is not None:
        stat = os.statvfs(directory)
        return SharedMemorySpace(
            min(stat.f_bavail * stat.f_frsize, _free_memory()),
            directory,
            f"a larger {directory}: start the container with --shm-size, or with --ipc=host",
        )
    return SharedMemorySpace(_free_memory(), "memory", "more memory: a larger --memory limit of the container")


def plan_rings(wanted: Sequence[RingShape], space: SharedMemorySpace) -> list[RingShape]:
    """The shapes that fit, in the order of those wanted; the wanted ones where they fit as they are.

    Raises:
        SharedMemoryError: Even the smallest rings do not fit; the message says what would help.
    """
    usable = int(space.free_bytes * USABLE)
    shapes = list(wanted)
    while sum(shape.total_bytes for shape in shapes) > usable:
        index = max(range(len(shapes)), key=lambda i: (_is_shrinkable(shapes[i]), shapes[i].total_bytes))
        if not _is_shrinkable(shapes[index]):
            raise _refusal(wanted, shapes, usable, space)
        shapes[index] = _shrunk(shapes[index])
    return shapes


def _is_shrinkable(shape: RingShape) -> bool:
    return shape.slot_bytes > MIN_SLOT_BYTES or shape.num_slots > MIN_SLOTS


def _shrunk(shape: RingShape) -> RingShape:
    if shape.slot_bytes > MIN_SLOT_BYTES:
        return msgspec.structs.replace(shape, slot_bytes=max(MIN_SLOT_BYTES, shape.slot_bytes // 2))
    return msgspec.structs.replace(shape, num_slots=shape.num_slots - 1)


def _refusal(
    wanted: Sequence[RingShape], least: Sequence[RingShape], usable: int, space: SharedMemorySpace
) -> SharedMemoryError:
    asked = sum(shape.total_bytes for shape in wanted)
    needed = sum(shape.total_bytes for shape in least)
    return SharedMemoryError(
        f"{len(wanted)} message queues want {asked:,} bytes of shared memory and need at least {needed:,}, but "
        f"{space.place} has {usable:,} to spare ({space.free_bytes:,} free). Use fewer workers, or {space.remedy}."
    )


def _free_memory() -> int:
    return min(psutil.virtual_memory().available, *_cgroup_headrooms(), 1 << 62)


def _cgroup_headrooms() -> list[int]:
    """What the memory limits of this process's control groups leave, from its own to the root's."""
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
    """Bytes of cached files, which count as used, and which the kernel drops before it refuses memory."""
    with contextlib.suppress(OSError, ValueError):
        fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))
    return 0

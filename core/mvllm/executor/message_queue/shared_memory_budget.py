"""Plans the shared memory of all rings of an engine before any of it is allocated.

Rings may shrink: a message that does not fit a slot is sent over a socket, so a smaller ring is only slower. Slot sizes
are halved first (largest rings first), then the number of slots is reduced. If the smallest rings do not fit, an error
says how much memory is missing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from mvllm.executor.message_queue.errors import SharedMemoryError
from mvllm.executor.message_queue.ring_buffer import RingShape
from mvllm.executor.message_queue.shared_segment import anonymous_directory
from mvllm.platform.host_memory import free_host_memory

MIN_SLOT_BYTES = 64 << 10
MIN_SLOTS = 3
USABLE = 7 / 8  # communication libraries use shared memory too


class SharedMemorySpace(msgspec.Struct, frozen=True):
    """The available shared memory.

    Attributes:
        free_bytes: Bytes that can be allocated.
        place: What it is a part of, for errors.
        remedy: How to get more, for errors.
    """

    free_bytes: int
    place: str
    remedy: str


def shared_memory_space(directory: str | None = None) -> SharedMemorySpace:
    """The free memory in `directory`, or the free anonymous memory for None (see SharedSegment.create)."""
    directory = directory or anonymous_directory()
    if directory is not None:
        stat = os.statvfs(directory)
        return SharedMemorySpace(
            min(stat.f_bavail * stat.f_frsize, free_host_memory()),
            directory,
            f"a larger {directory}: start the container with --shm-size, or with --ipc=host",
        )
    return SharedMemorySpace(free_host_memory(), "memory", "more memory: a larger --memory limit of the container")


def plan_rings(requested: Sequence[RingShape], space: SharedMemorySpace) -> list[RingShape]:
    """The shapes that fit, in the order of `requested`; the requested shapes themselves if they fit.

    Raises:
        SharedMemoryError: Even the smallest rings do not fit; the message says how to get more memory.
    """
    usable = int(space.free_bytes * USABLE)
    shapes = list(requested)
    while sum(shape.total_bytes for shape in shapes) > usable:
        index = max(range(len(shapes)), key=lambda i: (_is_shrinkable(shapes[i]), shapes[i].total_bytes))
        if not _is_shrinkable(shapes[index]):
            raise _space_error(requested, shapes, usable, space)
        shapes[index] = _shrunk(shapes[index])
    return shapes


def _is_shrinkable(shape: RingShape) -> bool:
    return shape.slot_bytes > MIN_SLOT_BYTES or shape.num_slots > MIN_SLOTS


def _shrunk(shape: RingShape) -> RingShape:
    if shape.slot_bytes > MIN_SLOT_BYTES:
        return msgspec.structs.replace(shape, slot_bytes=max(MIN_SLOT_BYTES, shape.slot_bytes // 2))
    return msgspec.structs.replace(shape, num_slots=shape.num_slots - 1)


def _space_error(
    requested: Sequence[RingShape], least: Sequence[RingShape], usable: int, space: SharedMemorySpace
) -> SharedMemoryError:
    requested_bytes = sum(shape.total_bytes for shape in requested)
    needed = sum(shape.total_bytes for shape in least)
    return SharedMemoryError(
        f"{len(requested)} message queues request {requested_bytes:,} bytes of shared memory and need at least "
        f"{needed:,}, but {space.place} has {usable:,} to spare ({space.free_bytes:,} free). "
        f"Use fewer workers, or {space.remedy}."
    )

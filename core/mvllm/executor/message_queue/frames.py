"""Packs several byte strings into one region of memory, each aligned to a cache line.

    count | length of each | pad | frame 0 | pad | frame 1 | ...

Frame 0 of a message is its msgpack encoding; the others are the buffers that are sent with it.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

from mvllm.executor.message_queue.errors import QueueCorruptError

ALIGNMENT = 64
_PAD, _MASK = ALIGNMENT - 1, -ALIGNMENT  # x + _PAD & _MASK is x rounded up
_MAX_FRAMES = 1 << 16
_COUNT = struct.Struct("Q")


def as_frame(buffer: object) -> bytes | memoryview:
    """The bytes of a buffer, without a copy.

    Raises:
        TypeError: It is no buffer, or not contiguous.
    """
    if isinstance(buffer, bytes):
        return buffer
    view = memoryview(buffer)  # type: ignore[arg-type]
    if not view.c_contiguous:
        raise TypeError(
            f"A buffer of shape {view.shape} and strides {view.strides} is not contiguous; make it so before sending."
        )
    return view.cast("B") if view.nbytes else b""  # a view with a zero in its shape cannot be cast


def packed_bytes(frames: Sequence[bytes | memoryview]) -> int:
    """The number of bytes that `pack` writes for `frames`."""
    total = _table(len(frames)).size + _PAD & _MASK
    for frame in frames:
        total += len(frame) + _PAD & _MASK
    return total


def pack(frames: Sequence[bytes | memoryview], into: memoryview, at: int = 0) -> None:
    """Copies `frames` into `into` from offset `at`, which leaves at least `packed_bytes(frames)` bytes."""
    table = _table(len(frames))
    table.pack_into(into, at, len(frames), *map(len, frames))
    start = at + (table.size + _PAD & _MASK)
    for frame in frames:
        end = start + len(frame)
        into[start:end] = frame
        start += len(frame) + _PAD & _MASK


def unpack(packed: memoryview) -> list[memoryview]:
    """The frames, as views of `packed`.

    Raises:
        QueueCorruptError: The lengths do not fit the memory.
    """
    size = len(packed)
    if size < ALIGNMENT:
        raise QueueCorruptError(f"A packed message has {size} bytes, less than its table takes.")
    (count,) = _COUNT.unpack_from(packed)
    if not 1 <= count <= min(_MAX_FRAMES, size // 8 - 1):
        raise QueueCorruptError(f"A packed message of {size} bytes claims {count} frames.")
    table = _table(count)
    _, *lengths = table.unpack_from(packed)
    start = table.size + _PAD & _MASK
    views = []
    for length in lengths:
        end = start + length
        if end > size:
            raise QueueCorruptError(f"A packed message of {size} bytes claims frames of {lengths} bytes.")
        views.append(packed[start:end])
        start += length + _PAD & _MASK
    return views


@functools.cache
def _table(count: int) -> struct.Struct:
    """The layout of the table in front of `count` frames."""
    return struct.Struct(f"{1 + count}Q")

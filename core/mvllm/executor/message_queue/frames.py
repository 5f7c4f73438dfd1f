"""Several byte strings in one stretch of memory, each on its own cache line.

    count | length of each | pad | frame 0 | pad | frame 1 | ...

Frame 0 of a message is its msgpack text; the others are the buffers that travel beside it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeAlias

from mvllm.executor.message_queue.errors import QueueCorruptError

Buffer: TypeAlias = "bytes | bytearray | memoryview"

ALIGNMENT = 64
_MAX_FRAMES = 1 << 16


def as_frame(buffer: object) -> bytes | memoryview:
    """A buffer's bytes, without a copy.

    Raises:
        TypeError: It is no buffer, or its bytes do not lie one after the other.
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
    """Bytes that `pack` needs."""
    total = _round_up(8 + 8 * len(frames))
    for frame in frames:
        total += _round_up(len(frame))
    return total


def pack(frames: Sequence[bytes | memoryview], into: memoryview) -> None:
    """Writes `frames` to memory of at least `packed_bytes(frames)` bytes: one copy of each."""
    struct.pack_into(f"{1 + len(frames)}Q", into, 0, len(frames), *map(len, frames))
    start = _round_up(8 + 8 * len(frames))
    for frame in frames:
        end = start + len(frame)
        into[start:end] = frame
        start = _round_up(end)


def unpack(packed: memoryview) -> list[memoryview]:
    """The frames, in place: views of `packed`.

    Raises:
        QueueCorruptError: The lengths do not fit the memory.
    """
    if len(packed) < ALIGNMENT:
        raise QueueCorruptError(f"A packed message has {len(packed)} bytes, less than its table takes.")
    (count,) = struct.unpack_from("Q", packed)
    if not 1 <= count <= min(_MAX_FRAMES, len(packed) // 8 - 1):
        raise QueueCorruptError(f"A packed message of {len(packed)} bytes claims {count} frames.")
    lengths = struct.unpack_from(f"{count}Q", packed, 8)
    start = _round_up(8 + 8 * count)
    views = []
    for length in lengths:
        end = start + length
        if end > len(packed):
            raise QueueCorruptError(f"A packed message of {len(packed)} bytes claims frames of {lengths} bytes.")
        views.append(packed[start:end])
        start = _round_up(end)
    return views


def _round_up(value: int) -> int:
    return -(-value // ALIGNMENT) * ALIGNMENT

"""Length-prefixed messages on the sockets and pipes between processes of one machine.

length (4 bytes, little-endian) | payload, usually msgpack
"""

from __future__ import annotations

import struct
from collections.abc import Callable

LENGTH = struct.Struct("<I")
"""The header of a frame: the payload's bytes."""

_READ_BYTES = 1 << 20  # at most, at once


def encode_frame(payload: bytes) -> bytes:
    """`payload` behind its length."""
    return LENGTH.pack(len(payload)) + payload


def read_frame(read: Callable[[int], bytes]) -> bytes:
    """The payload of the next frame.

    Args:
        read: Blocks until there are bytes and returns at most the given number; b"" at the end of the stream.

    Raises:
        EOFError: The other process closed the connection.
    """
    (length,) = LENGTH.unpack(_read_exactly(read, LENGTH.size))
    return _read_exactly(read, length)


def _read_exactly(read: Callable[[int], bytes], size: int) -> bytes:
    parts = []
    while size:
        part = read(min(size, _READ_BYTES))
        if not part:
            raise EOFError("the other process closed the connection")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)

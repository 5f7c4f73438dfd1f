"""Messages between two processes of one machine: MessagePack over a pipe, with their arrays in shared memory.

Each direction has one segment of shared memory, as large as the largest message so far: a file without a name, whose
descriptor is sent over the pipe. An array of a received message lies in the segment and is valid until the next message
of that direction. Imports no torch.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

_ALIGNMENT = 64
_ARRAY = 1
"""Code of MessagePack's extension type for arrays."""
_SHARED_MEMORY = "/dev/shm"  # noqa: S108  (files without a name)


class SharedMessages:
    """One end of a connection. Both ends alternate: a message is answered before the next one is sent.

    Args:
        connection: A pipe that sends in both directions.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._outgoing: mmap.mmap | None = None
        self._incoming: mmap.mmap | None = None

    def send(self, message: object, receiver: int) -> None:
        """Sends a message.

        Args:
            message: Numbers, strings, bytes, None and NumPy arrays, in lists and dictionaries.
            receiver: Process ID of the other end.

        Raises:
            OSError, EOFError: The other process has ended.
        """
        arrays: list[np.ndarray] = []
        size = 0

        def place(entry: object) -> msgspec.msgpack.Ext:
            nonlocal size
            if not isinstance(entry, np.ndarray):
                raise TypeError(f"A message has no {type(entry).__name__}.")
            arrays.append(np.ascontiguousarray(entry))
            start, size = size, size + -(-entry.nbytes // _ALIGNMENT) * _ALIGNMENT
            return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode((start, entry.dtype.str, entry.shape)))

        data = msgspec.msgpack.encode(message, enc_hook=place)
        descriptor = self._grow(size)
        start = 0
        for array in arrays:
            assert self._outgoing is not None
            self._outgoing[start : start + array.nbytes] = array.reshape(-1).view(np.uint8).data
            start += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._connection.send_bytes(b"" if descriptor is None else size.to_bytes(8, "little"))
        if descriptor is not None:
            reduction.send_handle(self._connection, descriptor, receiver)
            os.close(descriptor)
        self._connection.send_bytes(data)

    def receive(self) -> Any:
        """Waits for the next message. Tuples arrive as lists.

        Raises:
            EOFError, OSError: The other process has ended.
        """
        if new_size := self._connection.recv_bytes():
            descriptor = reduction.recv_handle(self._connection)
            self._incoming = mmap.mmap(descriptor, int.from_bytes(new_size, "little"))
            os.close(descriptor)
        return msgspec.msgpack.decode(self._connection.recv_bytes(), ext_hook=self._array)

    def _array(self, code: int, data: memoryview) -> np.ndarray:
        start, dtype, shape = msgspec.msgpack.decode(data)
        count = int(np.prod(shape))
        if self._incoming is None or not count:
            return np.empty(shape, dtype)
        return np.frombuffer(self._incoming, dtype, count, start).reshape(shape)

    def release(self) -> None:
        """Gives up the segment of outgoing messages; the next one with arrays gets another. Call it after a reply."""
        self._outgoing = None

    def close(self) -> None:
        """Closes the pipe. Idempotent."""
        self._outgoing = self._incoming = None
        self._connection.close()

    def _grow(self, size: int) -> int | None:
        """A descriptor of a larger segment, if the present one is too small. The other end has read what it holds."""
        if not size or (self._outgoing is not None and len(self._outgoing) >= size):
            return None
        try:
            return self._segment_in(_SHARED_MEMORY if os.path.isdir(_SHARED_MEMORY) else None, size)
        except OSError:  # containers often have little shared memory
            return self._segment_in(None, size)

    def _segment_in(self, folder: str | None, size: int) -> int:
        with tempfile.TemporaryFile(dir=folder) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
            self._outgoing = mmap.mmap(file.fileno(), size)
            return os.dup(file.fileno())

"""Messages between two processes of one machine: pickles over a pipe, with their arrays in shared memory.

Each direction has one segment of shared memory, as large as the largest message so far: a file without a name, whose
descriptor is sent over the pipe. An array of a received message lies in the segment and is valid until the next message
of that direction. Imports no torch.
"""

from __future__ import annotations

import mmap
import os
import pickle
import tempfile
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

_ALIGNMENT = 64
_SHARED_MEMORY = "/dev/shm"


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
            message: Anything that can be pickled.
            receiver: Process ID of the other end.

        Raises:
            OSError, EOFError: The other process has ended.
        """
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        views = [buffer.raw() for buffer in buffers]
        places, size = [], 0
        for view in views:
            places.append((size, view.nbytes))
            size += -(-view.nbytes // _ALIGNMENT) * _ALIGNMENT
        descriptor = self._grow(size)
        for view, (start, length) in zip(views, places, strict=True):
            assert self._outgoing is not None
            self._outgoing[start : start + length] = view
        self._connection.send((None if descriptor is None else size, places, data))
        if descriptor is not None:
            reduction.send_handle(self._connection, descriptor, receiver)
            os.close(descriptor)

    def receive(self) -> Any:
        """Waits for the next message.

        Raises:
            EOFError, OSError: The other process has ended.
        """
        new_size, places, data = self._connection.recv()
        if new_size is not None:
            descriptor = reduction.recv_handle(self._connection)
            self._incoming = mmap.mmap(descriptor, new_size)
            os.close(descriptor)
        view = memoryview(self._incoming) if places and self._incoming is not None else memoryview(b"")
        return pickle.loads(data, buffers=[view[start : start + length] for start, length in places])

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

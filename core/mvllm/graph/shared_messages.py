"""Messages between two processes of one machine: pickles over a pipe, with their arrays in shared memory.

Each direction has one segment of shared memory, as large as the largest message so far. An array of a received message
lies in the segment and is valid until the next message of that direction. Imports no torch.
"""

from __future__ import annotations

import pickle
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any

_ALIGNMENT = 64


class SharedMessages:
    """One end of a connection. Both ends alternate: a message is answered before the next one is sent.

    Args:
        connection: The pipe.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._outgoing: SharedMemory | None = None
        self._incoming: SharedMemory | None = None

    def send(self, message: object) -> None:
        """Sends a message.

        Raises:
            OSError, EOFError: The other process has ended.
        """
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        views = [buffer.raw() for buffer in buffers]
        offsets, size = [], 0
        for view in views:
            offsets.append(size)
            size += -(-view.nbytes // _ALIGNMENT) * _ALIGNMENT
        segment = self._segment(size) if size else None
        for view, offset in zip(views, offsets, strict=True):
            assert segment is not None
            segment.buf[offset : offset + view.nbytes] = view
        places = [(offset, view.nbytes) for view, offset in zip(views, offsets, strict=True)]
        self._connection.send((None if segment is None else segment.name, places, data))

    def receive(self) -> Any:
        """Waits for the next message.

        Raises:
            EOFError, OSError: The other process has ended.
        """
        name, places, data = self._connection.recv()
        if name is not None and (self._incoming is None or self._incoming.name != name):
            self._drop(self._incoming, owned=False)
            self._incoming = SharedMemory(name)
            _forget(self._incoming)
        buffers = [self._incoming.buf[start : start + size] for start, size in places] if self._incoming else []
        return pickle.loads(data, buffers=buffers)

    def close(self) -> None:
        """Frees the segments. Idempotent."""
        self._drop(self._outgoing, owned=True)
        self._drop(self._incoming, owned=False)
        self._outgoing = self._incoming = None
        self._connection.close()

    def _segment(self, size: int) -> SharedMemory:
        """A segment of at least `size` bytes. The other end has read what the last one contained."""
        if self._outgoing is None or self._outgoing.size < size:
            self._drop(self._outgoing, owned=True)
            self._outgoing = None
            self._outgoing = SharedMemory(create=True, size=size)
        return self._outgoing

    @staticmethod
    def _drop(segment: SharedMemory | None, *, owned: bool) -> None:
        if segment is None:
            return
        if owned:
            with suppress(FileNotFoundError):
                segment.unlink()
        with suppress(BufferError):  # an array of the last message still exists; its memory goes with it
            segment.close()


def _forget(segment: SharedMemory) -> None:
    """The process that made a segment removes it; this one's resource tracker must not."""
    with suppress(KeyError, ValueError):
        resource_tracker.unregister(getattr(segment, "_name", segment.name), "shared_memory")

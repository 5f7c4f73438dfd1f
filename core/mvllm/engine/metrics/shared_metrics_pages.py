"""Metrics of several front ends in shared memory: one page per front end.

Each front end writes its own page at any time; a front end that exports metrics reads all pages and sums them, without
locks or messages. A page that is being written does not match its checksum, and is read again.

    page    length | CRC-32 | msgpack
"""

from __future__ import annotations

import struct
import time
import zlib

from mvllm.executor.process.shared_memory import SharedMemory

PAGE_BYTES = 256 << 10
"""Pages that are never written use no memory. Metrics have a bounded number of labels."""

_HEAD = struct.Struct("=II")
_READ_SECONDS = 0.1


class SharedMetricsPages(SharedMemory):
    """The pages.

    Args:
        fd: Descriptor of the memory; this object closes it.
    """

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._num_pages = len(self._map) // PAGE_BYTES
        self._last: dict[int, bytes] = {}

    @classmethod
    def create(cls, num_pages: int) -> SharedMetricsPages:
        """Empty pages."""
        return cls.allocate("metrics", num_pages * PAGE_BYTES)

    def write(self, page: int, data: bytes) -> None:
        """Replaces the contents of a page. Only one thread of one process may write a page."""
        if len(data) > PAGE_BYTES - _HEAD.size:
            raise ValueError(f"{len(data)} bytes of metrics do not fit into a page of {PAGE_BYTES}")
        start = page * PAGE_BYTES
        self._map[start + _HEAD.size : start + _HEAD.size + len(data)] = data
        _HEAD.pack_into(self._map, start, len(data), zlib.crc32(data))

    def read(self, page: int) -> bytes:
        """The contents of a page; those of the last successful read, if it is being written for too long."""
        start = page * PAGE_BYTES + _HEAD.size
        deadline = time.monotonic() + _READ_SECONDS
        while True:
            length, checksum = _HEAD.unpack_from(self._map, start - _HEAD.size)
            data = self._map[start : start + min(length, PAGE_BYTES - _HEAD.size)]
            if zlib.crc32(data) == checksum:
                self._last[page] = data
                return data
            if time.monotonic() > deadline:
                return self._last.get(page, b"")

    def read_others(self, page: int) -> list[bytes]:
        """The contents of all pages except `page` and empty ones."""
        return [data for other in range(self._num_pages) if other != page and (data := self.read(other))]

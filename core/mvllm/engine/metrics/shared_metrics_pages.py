"""What each front end of an engine counts, readable by all of them at any time: a page of shared memory for each.

A front end writes its own page, as often as it likes; whoever shows figures reads all pages and adds them up. Nobody
asks anybody and nobody waits. A page that is being written does not match its checksum, and is read again.

    page    length | CRC-32 | msgpack
"""

from __future__ import annotations

import struct
import time
import zlib

from mvllm.executor.process.shared_memory import SharedMemory

PAGE_BYTES = 256 << 10
"""Untouched memory costs nothing; figures have bounded numbers of labels."""

_HEAD = struct.Struct("=II")
_READ_SECONDS = 0.1


class SharedMetricsPages(SharedMemory):
    """The pages.

    Args:
        fd: Their descriptor, which the board takes over.
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
        """Replaces what a page says. One thread of one process writes a page."""
        if len(data) > PAGE_BYTES - _HEAD.size:
            raise ValueError(f"{len(data)} bytes of figures do not fit into a page of {PAGE_BYTES}")
        start = page * PAGE_BYTES
        self._map[start + _HEAD.size : start + _HEAD.size + len(data)] = data
        _HEAD.pack_into(self._map, start, len(data), zlib.crc32(data))

    def read(self, page: int) -> bytes:
        """What a page says; what it said when it was last read, where its writer does not come to an end."""
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
        """What all pages but one say, those left out that nothing was written on."""
        return [data for other in range(self._num_pages) if other != page and (data := self.read(other))]

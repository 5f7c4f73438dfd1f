"""Memory arena for the intermediate tensors of a long step; a tensor's memory is reused as soon as it is freed.

A step with a long prompt allocates and frees some large tensors per layer. The C library's allocator places an aligned
block only in a larger hole, and needs two to three times the memory of the live tensors. This arena allocates the
lowest hole that is large enough, so that a step uses little more memory than its live tensors:

    | residual | queries, keys, values |  attention  | ...          one region; its pages are allocated on first use
    | residual | normalized | gate and up                 |         the same region, later in the layer

Memory is freed when the last tensor over it has been garbage-collected.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import weakref
from collections import deque
from dataclasses import dataclass, field

import torch

from mvllm_cpu import recording
from mvllm_cpu.memory import HUGE_PAGE, map_pages

SMALLEST = 1 << 18
"""Bytes below which torch's allocator is used."""

REGION_BYTES = 64 << 20
"""Bytes of addresses reserved at a time. Unused addresses take no memory."""

PAGE = mmap.PAGESIZE


@dataclass
class _Region:
    """Contiguous addresses and their free ranges.

    Attributes:
        pages: The memory mapping.
        begin, size: Range of the region.
        holes: Free ranges (begin, end), ascending and not adjacent.
    """

    pages: mmap.mmap
    begin: int
    size: int
    holes: list[tuple[int, int]] = field(default_factory=list)

    def allocate(self, size: int) -> int | None:
        """Allocates the lowest `size` free bytes; None if there is no hole of that size."""
        for i, (begin, end) in enumerate(self.holes):
            if end - begin >= size:
                self.holes[i : i + 1] = [(begin + size, end)] if end - begin > size else []
                return begin
        return None

    def free(self, begin: int, end: int) -> None:
        """Frees a range."""
        i = 0
        while i < len(self.holes) and self.holes[i][0] < begin:
            i += 1
        if i < len(self.holes) and self.holes[i][0] == end:
            end = self.holes.pop(i)[1]
        if i and self.holes[i - 1][1] == begin:
            i -= 1
            begin = self.holes.pop(i)[0]
        self.holes.insert(i, (begin, end))


class Workspace:
    """Allocates tensors in reserved regions. Thread-safe."""

    def __init__(self) -> None:
        self._regions: list[_Region] = []
        self._lock = threading.Lock()
        self._owners: dict[int, weakref.ref[ctypes.Array[ctypes.c_char]]] = {}
        # A tensor may be collected at any point, also while the lock is held: its range is queued here.
        self._returned: deque[tuple[int, int]] = deque()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of undefined contents.

        Raises:
            MemoryError: The address space is exhausted.
        """
        size = math.prod(shape) * dtype.itemsize
        pages = max(1, -(-size // PAGE)) * PAGE
        with self._lock:
            self._collect()
            begin = self._allocate(pages)
            # The tensor keeps its buffer alive; when the buffer is collected, the range is free.
            buffer = (ctypes.c_char * max(1, size)).from_address(begin)
            place = (begin, begin + pages)
            self._owners[begin] = weakref.ref(buffer, lambda _: self._returned.append(place))
        return torch.frombuffer(buffer, dtype=dtype, count=math.prod(shape)).view(shape)

    def release(self) -> None:
        """Returns the memory of all free ranges to the system."""
        with self._lock:
            self._collect()
            for region in self._regions:
                first = ctypes.addressof(ctypes.c_char.from_buffer(region.pages))
                for begin, end in region.holes:
                    region.pages.madvise(mmap.MADV_DONTNEED, begin - first, end - begin)

    def bytes_in_use(self) -> int:
        """Bytes of live tensors."""
        with self._lock:
            self._collect()
            return sum(r.size - sum(end - begin for begin, end in r.holes) for r in self._regions)

    def bytes_reserved(self) -> int:
        """Bytes of reserved addresses."""
        return sum(region.size for region in self._regions)

    def _allocate(self, size: int) -> int:
        for region in self._regions:
            if (begin := region.allocate(size)) is not None:
                return begin
        # Later regions are larger, so that a large model's tensors do not need a region each. The system may refuse so
        # many addresses (a limit, or more than its memory) and still grant the needed ones.
        room = _whole_pages(max(REGION_BYTES, 4 * size, self.bytes_reserved()))
        try:
            pages, first = map_pages(room)
        except MemoryError:
            room = _whole_pages(size)
            pages, first = map_pages(room)
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages)) + first
        self._regions.append(_Region(pages, address, room, [(address, address + room)]))
        taken = self._regions[-1].allocate(size)
        assert taken is not None
        return taken

    def _collect(self) -> None:
        while self._returned:
            begin, end = self._returned.popleft()
            del self._owners[begin]
            next(r for r in self._regions if r.begin <= begin < r.begin + r.size).free(begin, end)


def _whole_pages(size: int) -> int:
    return -(-size // HUGE_PAGE) * HUGE_PAGE


process_workspace = Workspace()


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An intermediate tensor with undefined contents, like `torch.empty`; large ones are in the workspace.

    While a step is recorded, torch allocates all of them, so that the recorder sees them.
    """
    if math.prod(shape) * dtype.itemsize < SMALLEST or recording.is_recording():
        return torch.empty(shape, dtype=dtype)
    return process_workspace.empty(shape, dtype)

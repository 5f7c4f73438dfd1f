"""Memory of a long step's intermediate tensors, each place used again as soon as its tensor is gone.

A prompt's step makes some large tensors per layer and drops them again. Through the C library's allocator, which finds
room for an aligned block only in a larger hole, that takes two to three times what is alive at any moment. Here the
lowest hole that is large enough is taken, so that a step touches little more than it needs:

    | residual | queries, keys, values |  attention  | ...          one region, claimed page by page
    | residual | normalised | gate and up                 |         the same, a moment later

Nothing has to be given back by hand: a place is free when the last tensor over it has been collected.
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
"""Bytes below which a tensor is the usual allocator's."""

REGION_BYTES = 64 << 20
"""Addresses that are reserved at a time. What is never used takes no memory."""

PAGE = mmap.PAGESIZE


@dataclass
class _Region:
    """Contiguous addresses, and which of them are free: pairs of begin and end, rising, never touching.

    Attributes:
        pages: What they are part of.
        begin, size: All of them.
        holes: The free ones.
    """

    pages: mmap.mmap
    begin: int
    size: int
    holes: list[tuple[int, int]] = field(default_factory=list)

    def allocate(self, size: int) -> int | None:
        """The lowest place of `size` bytes, no longer free; None where there is none."""
        for i, (begin, end) in enumerate(self.holes):
            if end - begin >= size:
                self.holes[i : i + 1] = [(begin + size, end)] if end - begin > size else []
                return begin
        return None

    def free(self, begin: int, end: int) -> None:
        """Makes a place free."""
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
    """Tensors in memory that is kept. Safe to use from several threads."""

    def __init__(self) -> None:
        self._regions: list[_Region] = []
        self._lock = threading.Lock()
        self._owners: dict[int, weakref.ref[ctypes.Array[ctypes.c_char]]] = {}
        # A tensor may be collected at any point, also while the lock is held: its place waits here.
        self._returned: deque[tuple[int, int]] = deque()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of undefined contents.

        Raises:
            MemoryError: The addresses cannot be had.
        """
        size = math.prod(shape) * dtype.itemsize
        pages = max(1, -(-size // PAGE)) * PAGE
        with self._lock:
            self._collect()
            begin = self._allocate(pages)
            # The tensor keeps its buffer alive, and the buffer's end is the place's.
            buffer = (ctypes.c_char * max(1, size)).from_address(begin)
            place = (begin, begin + pages)
            self._owners[begin] = weakref.ref(buffer, lambda _: self._returned.append(place))
        return torch.frombuffer(buffer, dtype=dtype, count=math.prod(shape)).view(shape)

    def release(self) -> None:
        """Gives the memory of all free places back to the system."""
        with self._lock:
            self._collect()
            for region in self._regions:
                first = ctypes.addressof(ctypes.c_char.from_buffer(region.pages))
                for begin, end in region.holes:
                    region.pages.madvise(mmap.MADV_DONTNEED, begin - first, end - begin)

    def bytes_in_use(self) -> int:
        """Bytes under tensors that are alive."""
        with self._lock:
            self._collect()
            return sum(r.size - sum(end - begin for begin, end in r.holes) for r in self._regions)

    def bytes_reserved(self) -> int:
        """Bytes of addresses."""
        return sum(region.size for region in self._regions)

    def _allocate(self, size: int) -> int:
        for region in self._regions:
            if (begin := region.allocate(size)) is not None:
                return begin
        # Later ones are larger, so that a large model's tensors do not end up in one each. That many addresses may be
        # refused, where they are limited or more than the machine has memory, and what is needed be had all the same.
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
    """An intermediate tensor of undefined contents: as `torch.empty`, in less memory where it is large.

    While a step is recorded its intermediates are torch's: recordings know whose they are.
    """
    if math.prod(shape) * dtype.itemsize < SMALLEST or recording.is_recording():
        return torch.empty(shape, dtype=dtype)
    return process_workspace.empty(shape, dtype)

"""Where the bytes of KV caches and packed weights come from."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import re
from pathlib import Path

import torch

from mvllm_cpu import host_resources

HUGE_PAGE = 2 << 20
"""What one translation of an address may cover, where the kernel plays along: 512 times the usual page."""

POOL_BYTES = 8 << 20

LARGE_CODE = 1 << 20
"""Bytes of a library's code below which letting go of it gains nothing."""

_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+)")


class Pool:
    """Zeroed memory for many tensors that are smaller than a huge page, side by side in some."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of `count` zeros.

        Raises:
            MemoryError: As for the function `zeros`.
        """
        size = count * dtype.itemsize
        if size >= HUGE_PAGE:
            return zeros((count,), dtype)
        if self._chunk.numel() < size:
            self._chunk = zeros((POOL_BYTES,), torch.uint8)
        taken, self._chunk = self._chunk[:size], self._chunk[-(-size // 64) * 64 :]
        return taken.view(dtype)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros whose pages the kernel hands out on first touch, in huge pages where it can.

    A cache is large and filled little by little; claiming it this way takes no time, and puts each page on the memory
    node of the core that first writes it. What is read as one stream, weights above all, comes faster from huge pages:
    prefetching is cut short wherever an address has to be translated first. Only whole ones are asked for, so nothing
    is taken beyond the tensor's size.

    Raises:
        MemoryError: The machine does not have that much memory free now.
    """
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    free = host_resources.memory_free()
    if size > free:
        raise MemoryError(f"A tensor of {size:,} bytes does not fit: {free:,} bytes of memory are free.")
    if size < HUGE_PAGE or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(shape, dtype=dtype)
    pages, begin = map_pages(size)
    return torch.frombuffer(pages, dtype=dtype, offset=begin, count=size // dtype.itemsize).view(shape)


def map_pages(size: int) -> tuple[mmap.mmap, int]:
    """Zeroed memory for `size` bytes, in huge pages where the kernel can, and the offset in it where they begin.

    Raises:
        MemoryError: The addresses cannot be had.
    """
    try:
        region = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as e:
        raise MemoryError(f"{size:,} bytes of memory cannot be had: {e}.") from e
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(region)) % HUGE_PAGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages: slower, not wrong
            region.madvise(mmap.MADV_HUGEPAGE, begin, size // HUGE_PAGE * HUGE_PAGE)
    return region, begin


def trim_heap() -> None:
    """Returns what the C library's allocator holds and nobody uses to the system, where it knows how to."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def release_pages(tensor: torch.Tensor) -> None:
    """Returns the whole pages of a tensor's memory to the system; nobody may read it any more, or its neighbours in it.

    Args:
        tensor: Without gaps.
    """
    page = mmap.PAGESIZE
    begin = -(-tensor.data_ptr() // page) * page
    size = (tensor.data_ptr() + tensor.nbytes) // page * page - begin
    if size > 0:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def release_code_pages() -> None:
    """Lets go of libraries' code: of what importing them has run, little is ever run again.

    What is run again comes back from the page cache. Only code that lies in memory as it lies in its file is let go:
    what a debugger or a linker has changed stays.
    """
    with contextlib.suppress(OSError, AttributeError):
        advise = ctypes.CDLL(None).madvise
        begin = size = 0
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if found := _MAPPING.match(line):
                begin, end = int(found[1], 16), int(found[2], 16)
                is_code = found[3] == "r-xp" and found[4] != "0"  # with a file's number behind it
                size = end - begin if is_code and end - begin >= LARGE_CODE else 0
            elif size and line.startswith("Anonymous:") and line.split()[1] == "0":
                advise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED)

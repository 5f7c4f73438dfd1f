"""Memory allocation for KV caches and packed weights (huge pages), and release of unused pages."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import re
from pathlib import Path

import torch

from mvllm_cpu import host_resources

HUGE_PAGE = 2 << 20
"""Size of a huge page in bytes."""

POOL_BYTES = 8 << 20

LARGE_CODE = 1 << 20
"""Size of a code mapping in bytes below which its pages are not released."""

_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+)")


class Pool:
    """Zeroed memory for many tensors, several per huge page.

    Args:
        chunk_bytes: Memory that is mapped at a time. Tensors of a quarter of it or more get their own mapping.
    """

    def __init__(self, chunk_bytes: int = POOL_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of `count` zeros.

        Raises:
            MemoryError: As for the function `zeros`.
        """
        size = count * dtype.itemsize
        if size >= self._chunk_bytes // 4:
            return zeros((count,), dtype)
        if self._chunk.numel() < size:
            self._chunk = zeros((self._chunk_bytes,), torch.uint8)
        taken, self._chunk = self._chunk[:size], self._chunk[-(-size // 64) * 64 :]
        return taken.view(dtype)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, *, small_front: int = 0) -> torch.Tensor:
    """A tensor of zeros whose pages the operating system allocates on first touch, as huge pages if possible.

    A KV cache is large and fills slowly; allocating it this way takes no time, and each page is allocated on the NUMA
    node of the core that first writes it. Memory that is read sequentially, such as weights, is faster in huge pages,
    because the hardware prefetcher stops at page boundaries. Only whole huge pages are requested, so no memory beyond
    the tensor's size is used.

    Args:
        shape, dtype: Those of the tensor.
        small_front: Bytes at the beginning that are in small pages. Where only these are written, the first write takes
            less time and memory.

    Raises:
        MemoryError: The tensor is larger than a huge page, and less memory than that is free.
    """
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    if size < HUGE_PAGE:
        return torch.zeros(shape, dtype=dtype)
    free = host_resources.memory_free()
    if size > free:
        raise MemoryError(f"A tensor of {size:,} bytes does not fit: {free:,} bytes of memory are free.")
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(shape, dtype=dtype)
    pages, begin = map_pages(size, small_front)
    return torch.frombuffer(pages, dtype=dtype, offset=begin, count=size // dtype.itemsize).view(shape)


def map_pages(size: int, small_front: int = 0) -> tuple[mmap.mmap, int]:
    """Maps `size` zeroed bytes; returns the mapping and the offset of the bytes.

    Those after `small_front` are in huge pages where possible.

    Raises:
        MemoryError: The address space is exhausted.
    """
    try:
        region = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as e:
        raise MemoryError(f"{size:,} bytes of memory cannot be mapped: {e}.") from e
    small = min(-(-small_front // mmap.PAGESIZE) * mmap.PAGESIZE, size // mmap.PAGESIZE * mmap.PAGESIZE)
    begin = -(ctypes.addressof(ctypes.c_char.from_buffer(region)) + small) % HUGE_PAGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # systems without huge pages are slower
            region.madvise(mmap.MADV_HUGEPAGE, begin + small, (size - small) // HUGE_PAGE * HUGE_PAGE)
    return region, begin


def trim_heap() -> None:
    """Returns unused memory of the C library's allocator to the system (malloc_trim), where it exists."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def release_pages(tensor: torch.Tensor) -> None:
    """Returns the whole pages of a tensor's memory to the system; the tensor's values must not be read afterwards.

    Args:
        tensor: Contiguous.
    """
    page = mmap.PAGESIZE
    begin = -(-tensor.data_ptr() // page) * page
    size = (tensor.data_ptr() + tensor.nbytes) // page * page - begin
    if size > 0:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


@functools.cache
def release_code_pages() -> None:
    """Releases the code pages of libraries, most of which are used only during import. Later calls do nothing.

    Pages that are used again are read from the page cache. Only unmodified code is released, not pages that a debugger
    or a linker has changed.
    """
    with contextlib.suppress(OSError, AttributeError):
        advise = ctypes.CDLL(None).madvise
        begin = size = 0
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if found := _MAPPING.match(line):
                begin, end = int(found[1], 16), int(found[2], 16)
                is_code = found[3] == "r-xp" and found[4] != "0"  # executable and mapped from a file
                size = end - begin if is_code and end - begin >= LARGE_CODE else 0
            elif size and line.startswith("Anonymous:") and line.split()[1] == "0":
                advise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED)

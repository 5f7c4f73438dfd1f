"""Where a KV cache's bytes come from."""

from __future__ import annotations

import contextlib
import mmap

import torch

from mvllm_cpu import machine

HUGE_PAGES_FROM = 8 << 20


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros whose pages the kernel hands out on first touch, in huge pages where it can.

    A cache is large and filled little by little; claiming it this way takes no time, puts each page on the memory node
    of the core that first writes it, and keeps address translation out of attention's inner loop.

    Raises:
        MemoryError: The machine does not have that much memory free now.
    """
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    free = machine.memory_free()
    if size > free:
        raise MemoryError(f"A tensor of {size:,} bytes does not fit: {free:,} bytes of memory are free.")
    if size < HUGE_PAGES_FROM or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(shape, dtype=dtype)
    try:
        region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as e:
        raise MemoryError(f"A tensor of {size:,} bytes does not fit: {e}.") from e
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages: slower, not wrong
            region.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(region, dtype=dtype).view(shape)

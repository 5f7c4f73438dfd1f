"""Kernel that adds the partial results of products whose inner dimension is split among programs.

A split writes its float32 partial to its own memory, and one program adds them in the order of the splits, so results
do not depend on which program ends first. There are no atomic operations.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def splitk_reduce(
    out,  # [size]
    parts,  # [SPLITS, size] float32
    size,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of all splits, rounded once."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + split * size.to(tl.int64) + at, mask=mask, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)

"""Kernels of RMS norms: a program normalizes one or more whole rows."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normalized(wide, weight, eps, SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """Rows [rows, PAD] of float32, zeros past SIZE, divided by their root mean square; rounded, then times weight."""
    inverse = tl.rsqrt(tl.sum(wide * wide, 1) / SIZE + eps)
    rounded = (wide * inverse[:, None]).to(DTYPE).to(tl.float32)
    return (rounded * weight.to(tl.float32)[None, :]).to(DTYPE)


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm(
    out,  # [num_rows, SIZE], contiguous
    x,  # [num_rows / INNER, INNER, SIZE]
    weight,  # [SIZE]
    eps,
    num_rows,
    outer_stride,
    inner_stride,
    INNER: tl.constexpr,
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, PAD)
    is_column = column < SIZE
    mask = (row < num_rows)[:, None] & is_column[None, :]
    place = (row // INNER) * outer_stride + (row % INNER) * inner_stride
    wide = tl.load(x + place[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    factor = tl.load(weight + column, mask=is_column, other=0.0)
    result = normalized(wide, factor, eps, SIZE, out.dtype.element_ty)
    tl.store(out + row[:, None] * SIZE + column[None, :], result, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def fused_add_rms_norm(
    x,  # [num_rows, SIZE], contiguous: becomes the norm of the sum
    residual,  # likewise: becomes the sum
    weight,
    eps,
    num_rows,
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    DTYPE: tl.constexpr = x.dtype.element_ty
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, PAD)
    is_column = column < SIZE
    mask = (row < num_rows)[:, None] & is_column[None, :]
    place = row[:, None] * SIZE + column[None, :]
    added = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    added += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    total = added.to(DTYPE)
    tl.store(residual + place, total, mask=mask)
    factor = tl.load(weight + column, mask=is_column, other=0.0)
    tl.store(x + place, normalized(total.to(tl.float32), factor, eps, SIZE, DTYPE), mask=mask)

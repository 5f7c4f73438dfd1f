"""Kernels of argmax in two steps: over pieces of each row, then over the pieces' results.

Elements are compared as int64: the upper half is an integer with the order of the element, the lower half its index,
counted from the end. So the first of equal elements is the largest, whatever the pieces are, and a NaN is larger than
any number.
"""

from __future__ import annotations

import triton
import triton.language as tl

LEAST = tl.constexpr(-0x8000000000000000)


@triton.jit
def ordered_key(value, place):
    """int64 that compare as float32 values do; among equal values, the smaller index is larger."""
    value = tl.where(value == 0.0, 0.0, value)  # minus zero equals zero
    bits = value.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(value != value, 0x7FFFFFFF, order)
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - place).to(tl.int64)


@triton.jit(do_not_specialize=["num_pieces", "piece_size"])
def argmax_partial(
    found,  # [rows, pieces] int64
    x,  # [rows, size]
    row_stride,
    size,
    num_pieces,
    piece_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    best = tl.full([BLOCK], LEAST, dtype=tl.int64)
    for start in tl.range(0, piece_size, BLOCK):
        column = piece * piece_size + start + tl.arange(0, BLOCK)
        mask = column < size
        value = tl.load(x + row * row_stride + column, mask=mask, other=0.0).to(tl.float32)
        best = tl.maximum(best, tl.where(mask, ordered_key(value, column), LEAST))
    tl.store(found + row * num_pieces + piece, tl.max(best, 0))


@triton.jit(do_not_specialize=["num_pieces"])
def argmax_reduce(
    values,  # [rows]
    places,  # [rows] int64
    found,  # [rows, pieces] int64
    x,  # [rows, size]
    row_stride,
    num_pieces,
    PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, PAD)
    best = tl.max(tl.load(found + row * num_pieces + piece, mask=piece < num_pieces, other=LEAST), 0)
    place = 0x7FFFFFFF - (best & 0x7FFFFFFF)
    tl.store(places + row, place)
    tl.store(values + row, tl.load(x + row * row_stride + place))

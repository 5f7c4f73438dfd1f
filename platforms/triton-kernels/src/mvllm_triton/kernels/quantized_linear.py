"""Kernels of products with int8 and int4 weights.

    weight of 8 bits   [OUT, IN_PAD] int8
    weight of 4 bits   [OUT, IN_PAD / 2] uint8: byte i of a block of BLOCK_K columns has column i in its lower half and
                       column BLOCK_K / 2 + i in its upper half; both plus 8

Integers up to 255 are exact in every compute dtype. So the kernel multiplies the integers, and multiplies the sum over
each group of columns with the group's scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mvllm_triton.kernels.numbers import int8_codes


@triton.jit
def quantize_rows(
    codes,  # [rows, SIZE] int8, contiguous
    scales,  # [rows] float32
    x,  # [rows, SIZE]
    x_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rounds each row to int8: its largest magnitude becomes 127. One program per row reads it twice."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    for start in tl.range(0, SIZE, BLOCK):
        k = start + column
        value = tl.load(x + row * x_stride + k, mask=k < SIZE, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
    scale = tl.div_rn(tl.max(largest, 0), 127.0)
    tl.store(scales + row, scale)
    divisor = tl.where(scale > 0.0, scale, 1.0)
    for start in tl.range(0, SIZE, BLOCK):
        k = start + column
        value = tl.load(x + row * x_stride + k, mask=k < SIZE, other=0.0).to(tl.float32)
        rounded = int8_codes(tl.div_rn(value, tl.zeros([BLOCK], dtype=tl.float32) + divisor))
        tl.store(codes + row * SIZE + k, rounded, mask=k < SIZE)


@triton.jit
def add_product(total, x, x_mask, w, zero, scale, DTYPE: tl.constexpr, ZEROS: tl.constexpr, INT8: tl.constexpr):
    """`total` plus the product of a tile of rows, at `x`, and a tile of integers [k, n], in units of their scales."""
    row = tl.load(x, mask=x_mask, other=0)
    if INT8:
        if w.shape[0] < 32:  # too few columns for an integer product; as floats the integers and their sums are exact
            sums = tl.dot(row.to(tl.float32).to(tl.bfloat16), w.to(tl.float32).to(tl.bfloat16)).to(tl.int32)
        else:
            sums = tl.dot(row, w, out_dtype=tl.int32)
        if ZEROS:
            sums -= tl.sum(row.to(tl.int32), 1)[:, None] * zero[None, :]
        total += sums.to(tl.float32) * scale[None, :]
    else:
        if ZEROS:
            w = w.to(tl.int16) - zero.to(tl.int16)[None, :]
        total += tl.dot(row, w.to(tl.float32).to(DTYPE), input_precision="ieee") * scale[None, :]
    return total


@triton.jit(do_not_specialize=["num_rows"])
def multiply(
    out,  # [num_rows, OUT], contiguous
    x,  # [num_rows, IN], compute dtype; int8 with INT8
    x_scales,  # [num_rows] float32, with INT8
    weight,
    scales,  # [OUT, groups] float32, contiguous
    zero_points,  # [OUT, groups] int8, contiguous, with ZEROS
    bias,  # [OUT]
    num_rows,
    x_stride,
    weight_stride,
    IN: tl.constexpr,
    IN_PAD: tl.constexpr,
    OUT: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    ZEROS: tl.constexpr,
    INT8: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # divides GROUP_SIZE, or there is one group
):
    NUM_GROUPS: tl.constexpr = (IN + GROUP_SIZE - 1) // GROUP_SIZE
    DTYPE: tl.constexpr = out.dtype.element_ty
    HALF: tl.constexpr = BLOCK_K // 2
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = row < num_rows, column < OUT
    x_row = x + row[:, None] * x_stride
    weight_row = weight + column[None, :].to(tl.int64) * weight_stride
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    zero = tl.zeros([BLOCK_N], dtype=tl.int32)
    for start in tl.range(0, IN_PAD, BLOCK_K):
        group = column * NUM_GROUPS + (start // GROUP_SIZE if NUM_GROUPS > 1 else 0)
        scale = tl.load(scales + group, mask=is_column, other=0.0)
        if ZEROS:
            zero = tl.load(zero_points + group, mask=is_column, other=0).to(tl.int32)
        if BITS == 8:
            k = start + tl.arange(0, BLOCK_K)
            w = tl.load(weight_row + k[:, None], mask=is_column[None, :], other=0)
            mask = is_row[:, None] & (k < IN)[None, :]
            total = add_product(total, x_row + k[None, :], mask, w, zero, scale, DTYPE, ZEROS, INT8)
        else:
            half = tl.arange(0, HALF)
            pair = tl.load(weight_row + (start // 2 + half)[:, None], mask=is_column[None, :], other=0)
            k = start + half
            w = ((pair & 0xF).to(tl.int32) - 8).to(tl.int8)
            mask = is_row[:, None] & (k < IN)[None, :]
            total = add_product(total, x_row + k[None, :], mask, w, zero, scale, DTYPE, ZEROS, INT8)
            k += HALF
            w = ((pair >> 4).to(tl.int32) - 8).to(tl.int8)
            mask = is_row[:, None] & (k < IN)[None, :]
            total = add_product(total, x_row + k[None, :], mask, w, zero, scale, DTYPE, ZEROS, INT8)
    if INT8:
        total *= tl.load(x_scales + row, mask=is_row, other=0.0)[:, None]
    if BIAS:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    target = out + row[:, None] * OUT + column[None, :]
    tl.store(target, total.to(DTYPE), mask=is_row[:, None] & is_column[None, :])

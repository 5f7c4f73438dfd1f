"""Kernels of products with int8 and int4 weights.

    weight of 8 bits   [OUT, IN_PAD] int8
    weight of 4 bits   [OUT, IN_PAD / 2] uint8: byte i of a block of BLOCK_K columns has column i in its lower half and
                       column BLOCK_K / 2 + i in its upper half; both plus 8

Integers up to 255 are exact in every compute dtype. So the kernel multiplies the integers, and multiplies the sum over
each group of columns with the group's scale. Few rows have few tiles: their columns are split among more programs
(kernels/split_k.py).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from mvllm_triton.kernels.numbers import int8_codes
from mvllm_triton.kernels.packed_numbers import offset_integers, unpacked_int4


@triton.jit
def scaled_int8_quant(
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
def integer_sums(row, w, zero):
    """The product of int8 rows [m, k] and int8 integers [k, n] minus their zero points [n], in int32."""
    if w.shape[0] < 32:  # too few columns for an integer product; as floats the integers and their sums are exact
        sums = tl.dot(row.to(tl.float32).to(tl.bfloat16), w.to(tl.float32).to(tl.bfloat16)).to(tl.int32)
    else:
        sums = tl.dot(row, w, out_dtype=tl.int32)
    return sums - tl.sum(row.to(tl.int32), 1)[:, None] * zero[None, :]


@triton.jit
def add_int8(total, row, w, zero, scale, DTYPE: tl.constexpr, INT8: tl.constexpr):
    """`total` plus the scaled product of a tile of rows [m, k] and int8 integers [k, n]."""
    if INT8:
        total += integer_sums(row, w, zero).to(tl.float32) * scale[None, :]
    else:
        base = zero.to(tl.float32) + (8388608.0 + 128)
        w = offset_integers(w.to(tl.uint8, bitcast=True) ^ 0x80, base, DTYPE)
        total += tl.dot(row, w, input_precision="ieee") * scale[None, :]
    return total


@triton.jit
def add_int4(
    total, low_row, high_row, pair, zero, scale, DTYPE: tl.constexpr, INT8: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """`total` plus the scaled product of two tiles of rows [m, k] and the halves of bytes [k, n]."""
    if INT8:
        sums = integer_sums(low_row, ((pair & 0xF).to(tl.int32) - 8).to(tl.int8), zero)
        sums += integer_sums(high_row, ((pair >> 4).to(tl.int32) - 8).to(tl.int8), zero)
        total += sums.to(tl.float32) * scale[None, :]
    else:
        low, high = unpacked_int4(pair, zero, DTYPE, PTX)
        sums = tl.dot(low_row, low, input_precision="ieee")
        sums = tl.dot(high_row, high, sums, input_precision="ieee")
        total += sums * scale[None, :]
    return total


def _kernel_name(specialization: Any) -> str:
    """The name of the compiled kernel, which profilers print."""
    constants = specialization.constants
    return f"w{constants['BITS']}a{8 if constants['INT8'] else 16}_gemm"


@triton.jit(repr=_kernel_name, do_not_specialize=["num_rows"])
def quantized_gemm(
    out,  # [num_rows, OUT], contiguous; with SPLITS > 1 [SPLITS, num_rows, OUT] float32
    x,  # [num_rows, IN], compute dtype; int8 with INT8
    x_scales,  # [num_rows] float32, with INT8
    weight,
    scales,  # [groups, OUT] float32, contiguous
    zero_points,  # [groups, OUT] int8, contiguous, with ZEROS
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
    DTYPE: tl.constexpr,  # the compute dtype
    PTX: tl.constexpr,  # see kernels/packed_numbers.py
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,  # columns of a split, a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # divides GROUP_SIZE, or there is one group
):
    MANY: tl.constexpr = GROUP_SIZE < IN
    HALF: tl.constexpr = BLOCK_K // 2
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    is_row, is_column = row < num_rows, column < OUT
    x_row = x + row[:, None] * x_stride
    weight_row = weight + column[None, :].to(tl.int64) * weight_stride
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    zero = tl.zeros([BLOCK_N], dtype=tl.int32)
    first = split * CHUNK if SPLITS > 1 else 0
    last = tl.minimum(first + CHUNK, IN_PAD) if SPLITS > 1 else IN_PAD
    for start in tl.range(first, last, BLOCK_K):
        group = column + (start // GROUP_SIZE * OUT if MANY else 0)
        scale = tl.load(scales + group, mask=is_column, other=0.0)
        if ZEROS:
            zero = tl.load(zero_points + group, mask=is_column, other=0).to(tl.int32)
        if BITS == 8:
            k = start + tl.arange(0, BLOCK_K)
            w = tl.load(weight_row + k[:, None], mask=is_column[None, :], other=0)
            mask = is_row[:, None]
            if IN % BLOCK_K != 0:
                mask = mask & (k < IN)[None, :]
            x_tile = tl.load(x_row + k[None, :], mask=mask, other=0)
            total = add_int8(total, x_tile, w, zero, scale, DTYPE, INT8)
        else:
            half = tl.arange(0, HALF)
            pair = tl.load(weight_row + (start // 2 + half)[:, None], mask=is_column[None, :], other=0)
            k = start + half
            low_mask, high_mask = is_row[:, None], is_row[:, None]
            if IN % BLOCK_K != 0:
                low_mask, high_mask = low_mask & (k < IN)[None, :], high_mask & (k + HALF < IN)[None, :]
            low_row = tl.load(x_row + k[None, :], mask=low_mask, other=0)
            high_row = tl.load(x_row + (k + HALF)[None, :], mask=high_mask, other=0)
            total = add_int4(total, low_row, high_row, pair, zero, scale, DTYPE, INT8, PTX)
    if INT8:
        total *= tl.load(x_scales + row, mask=is_row, other=0.0)[:, None]
    if BIAS:
        is_added = is_column & (split == 0)
        total += tl.load(bias + column, mask=is_added, other=0.0).to(tl.float32)[None, :]
    target = out + row[:, None] * OUT + column[None, :]
    if SPLITS > 1:
        target += split.to(tl.int64) * num_rows * OUT
    tl.store(target, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])

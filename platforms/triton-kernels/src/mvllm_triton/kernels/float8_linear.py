"""Kernels of products with a float8 weight: tiles are multiplied, and their sums are multiplied with the scales.

The input is either float8 (W8A8; multiplied in float8 if the device can) or unquantized floats.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mvllm_triton.kernels.numbers import float8_codes, widen


@triton.jit
def scaled_fp8_quant(
    codes,  # [rows, SIZE] uint8, contiguous
    scales,  # [rows, groups] float32, contiguous
    x,  # [rows, SIZE]
    given,  # [1] float32, with GIVEN
    x_stride,
    SIZE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # GROUP_SIZE if there are several groups
    FP8: tl.constexpr,
    LARGEST: tl.constexpr,
    GIVEN: tl.constexpr,
):
    """Rounds each group of a row to float8, with the given scale or one that maps its largest magnitude to LARGEST.

    The scale of a group with a NaN is NaN, because not every conversion of codes keeps NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    first = group * GROUP_SIZE
    column = tl.arange(0, BLOCK)
    end = tl.minimum(first + GROUP_SIZE, SIZE)
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    odd = tl.zeros([BLOCK], dtype=tl.int32)
    for start in tl.range(first, end, BLOCK):
        k = start + column
        value = tl.load(x + row * x_stride + k, mask=k < end, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
        odd |= (value != value).to(tl.int32)
    scale = tl.load(given) if GIVEN else tl.max(largest, 0) / LARGEST
    divisor = tl.where(scale > 0.0, scale, 1.0)
    tl.store(scales + row * tl.num_programs(1) + group, tl.where(tl.max(odd, 0) > 0, float("nan"), scale))
    for start in tl.range(first, end, BLOCK):
        k = start + column
        value = tl.load(x + row * x_stride + k, mask=k < end, other=0.0).to(tl.float32)
        tl.store(codes + row * SIZE + k, float8_codes(value / divisor, FP8), mask=k < end)


@triton.jit(do_not_specialize=["num_rows"])
def fp8_gemm(
    out,  # [num_rows, OUT], contiguous; with SPLITS > 1 [SPLITS, num_rows, OUT] float32
    x,  # [num_rows, IN], float8 or codes; or unquantized
    x_scales,  # [num_rows, x groups] float32, with X_SCALED
    weight,  # [OUT, IN], float8 or codes
    scales,  # float32, addressed with the strides below
    bias,  # [OUT]
    num_rows,
    x_stride,
    x_scale_row_stride,
    x_scale_group_stride,
    weight_stride,
    scale_row_stride,
    scale_group_stride,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GROUP_SIZE: tl.constexpr,  # columns that share scales, of x and of the weight; IN if all do
    GROUP_ROWS: tl.constexpr,  # rows of the weight that share a scale
    BIAS: tl.constexpr,
    X_SCALED: tl.constexpr,
    FP8: tl.constexpr,  # see `numbers.widen`
    DTYPE: tl.constexpr,  # the compute dtype
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,  # columns of a split, a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # divides GROUP_SIZE, or there is one group
):
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    is_row, is_column = row < num_rows, column < OUT
    inner = tl.arange(0, BLOCK_K)
    x_scale = x_scales + row * x_scale_row_stride
    scale = scales + (column // GROUP_ROWS) * scale_row_stride
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    first = split * CHUNK if SPLITS > 1 else 0
    last = tl.minimum(first + CHUNK, IN) if SPLITS > 1 else IN
    for start in tl.range(first, last, BLOCK_K):
        k = start + inner
        a_mask, b_mask = is_row[:, None], is_column[None, :]
        if IN % BLOCK_K != 0:
            a_mask, b_mask = a_mask & (k < IN)[None, :], b_mask & (k < IN)[:, None]
        a = tl.load(x + row[:, None] * x_stride + k[None, :], mask=a_mask, other=0.0)
        b = tl.load(weight + column[None, :].to(tl.int64) * weight_stride + k[:, None], mask=b_mask, other=0.0)
        if FP8 > 0:
            b = widen(b, DTYPE, FP8)
            if X_SCALED:
                a = widen(a, DTYPE, FP8)
        if GROUP_SIZE < IN:
            group = start // GROUP_SIZE
            column_scale = tl.load(scale + group * scale_group_stride, mask=is_column, other=0.0)
            sums = tl.dot(a, b, input_precision="ieee") * column_scale[None, :]
            if X_SCALED:
                sums *= tl.load(x_scale + group * x_scale_group_stride, mask=is_row, other=0.0)[:, None]
            total += sums
        else:
            total = tl.dot(a, b, total, input_precision="ieee")
    if GROUP_SIZE >= IN:
        if X_SCALED:
            total *= tl.load(x_scale, mask=is_row, other=0.0)[:, None]
        total *= tl.load(scale, mask=is_column, other=0.0)[None, :]
    if BIAS:
        is_added = is_column & (split == 0)
        total += tl.load(bias + column, mask=is_added, other=0.0).to(tl.float32)[None, :]
    target = out + row[:, None] * OUT + column[None, :]
    if SPLITS > 1:
        target += split.to(tl.int64) * num_rows * OUT
    tl.store(target, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])

"""Kernels of mixture of experts with packed weights: like kernels/moe.py, with weights that are widened in registers.

    MXFP4    [experts, ROWS, IN_PAD / 2] uint8; each 64 columns are 32 bytes: byte i has column i in its lower half and
             column 32 + i in its upper half. Scales: [experts, ceil(IN / 128), ROWS] int32, whose byte j is the
             exponent of columns 32 * j to 32 * j + 31 of 128
    INT4     [experts, ROWS, IN_PAD / 2] uint8, as in kernels/quantized_linear.py, in blocks of BLOCK_K columns
    INT8     [experts, ROWS, IN_PAD] int8
    FLOAT8   [experts, ROWS, IN_PAD] float8, or codes in uint8
             Scales of these: [experts, groups, ceil(ROWS / GROUP_ROWS)] float32; zero points of integers: [experts,
             groups, ROWS] int8

Scales of neighbouring rows are adjacent, so that a program reads those of its columns at once.

MXFP4's scales are powers of two: they multiply the weights, which is exact. Other scales multiply the sums over each
group of columns.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from mvllm_triton.kernels.activation import SILU, activate
from mvllm_triton.kernels.numbers import widen
from mvllm_triton.kernels.packed_numbers import unpacked_e2m1
from mvllm_triton.kernels.quantized_linear import add_int4, add_int8

MXFP4 = tl.constexpr(0)
INT4 = tl.constexpr(1)
INT8 = tl.constexpr(2)
FLOAT8 = tl.constexpr(3)


@triton.jit
def add_mxfp4(
    total, low_row, high_row, pair, exponents, HALF: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """`total` plus the product of 64 columns: two tiles of rows [m, 32], and bytes [32, n]."""
    low, high = unpacked_e2m1(pair, exponents, 2 * HALF, DTYPE, PTX)
    total = tl.dot(low_row, low, total, input_precision="ieee")
    return tl.dot(high_row, high, total, input_precision="ieee")


def _kernel_name(specialization: Any) -> str:
    """The name of the compiled kernel, which profilers print."""
    return f"fused_moe_{('mxfp4', 'int4', 'int8', 'fp8')[specialization.constants['KIND']]}"


@triton.jit(repr=_kernel_name, do_not_specialize=["num_entries"])
def fused_moe_quantized(
    out,  # [entries, OUT], contiguous; with SPLITS > 1 [SPLITS, entries, ROWS] float32
    x,  # [entries / TOP_K, IN], compute dtype; int8, float8 or codes with ROUNDED
    x_scales,  # float32, addressed with the strides below, with ROUNDED
    weight,
    scales,
    zero_points,  # with ZEROS
    bias,  # [experts, ROWS]
    order,  # see kernels/moe.py
    tiles,
    num_entries,
    x_stride,
    x_scale_row_stride,
    x_scale_group_stride,
    alpha,
    limit,
    KIND: tl.constexpr,
    IN: tl.constexpr,
    IN_PAD: tl.constexpr,
    OUT: tl.constexpr,
    GROUP_SIZE: tl.constexpr,  # columns that share a scale; IN or more if all do
    GROUP_ROWS: tl.constexpr,  # rows of the weight that share a scale
    TOP_K: tl.constexpr,  # 1 if there is a row for each entry
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    BIAS: tl.constexpr,
    ZEROS: tl.constexpr,
    ROUNDED: tl.constexpr,  # inputs are rounded to 8 bits
    FP8: tl.constexpr,  # see `numbers.widen`
    COMPUTE: tl.constexpr,  # dtype of unrounded inputs
    PTX: tl.constexpr,  # see kernels/packed_numbers.py
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,  # columns of a split, a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # divides GROUP_SIZE, or there is one group; 128 for MXFP4
):
    """Rows of `x` times the weights of their experts; with GATED and one split, followed by the gated activation."""
    ROWS: tl.constexpr = 2 * OUT if GATED else OUT
    PACKED: tl.constexpr = KIND < INT8
    ROW_BYTES: tl.constexpr = IN_PAD // 2 if PACKED else IN_PAD
    SCALE_ROWS: tl.constexpr = ROWS if KIND == MXFP4 else (ROWS + GROUP_ROWS - 1) // GROUP_ROWS
    MANY: tl.constexpr = GROUP_SIZE < IN
    NUM_SCALES: tl.constexpr = (
        (IN + 127) // 128 if KIND == MXFP4 else ((IN + GROUP_SIZE - 1) // GROUP_SIZE if MANY else 1)
    )
    tile = tl.program_id(0)
    expert = tl.load(tiles + tile).to(tl.int64)
    if expert < 0:
        return
    entry = tl.load(order + tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    is_entry = entry < num_entries
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < OUT
    split = tl.program_id(2)
    token = tl.where(is_entry, entry // TOP_K, 0)
    x_row = x + token[:, None] * x_stride
    x_scale = x_scales + token * x_scale_row_stride
    w_row = weight + expert * (ROWS * ROW_BYTES) + column[None, :].to(tl.int64) * ROW_BYTES
    scale_at = scales + expert * (NUM_SCALES * SCALE_ROWS)
    gate_scale, up_scale = scale_at + column // GROUP_ROWS, scale_at + (OUT + column) // GROUP_ROWS
    zero_at = zero_points + expert * (NUM_SCALES * ROWS) + column
    gate_zero = tl.zeros([BLOCK_N], dtype=tl.int32)
    up_zero = gate_zero
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    up_total = total
    first = split * CHUNK if SPLITS > 1 else 0
    last = tl.minimum(first + CHUNK, IN_PAD) if SPLITS > 1 else IN_PAD
    for start in tl.range(first, last, BLOCK_K):
        if KIND == MXFP4:
            exponents = tl.load(gate_scale + start // 128 * ROWS, mask=is_column, other=0)
            if GATED:
                up_exponents = tl.load(up_scale + start // 128 * ROWS, mask=is_column, other=0)
            byte = tl.arange(0, 32)
            for half in tl.static_range(2):
                k = start + 64 * half + byte
                low_mask, high_mask, w_mask = is_entry[:, None], is_entry[:, None], is_column[None, :]
                if IN % 128 != 0:
                    low_mask, high_mask = low_mask & (k < IN)[None, :], high_mask & (k + 32 < IN)[None, :]
                    w_mask = w_mask & (start + 64 * half < IN)
                low_row = tl.load(x_row + k[None, :], mask=low_mask, other=0.0)
                high_row = tl.load(x_row + (k + 32)[None, :], mask=high_mask, other=0.0)
                pair_at = w_row + (start // 2 + 32 * half + byte)[:, None]
                pair = tl.load(pair_at, mask=w_mask, other=0)
                total = add_mxfp4(total, low_row, high_row, pair, exponents, half, COMPUTE, PTX)
                if GATED:
                    pair = tl.load(pair_at + OUT * ROW_BYTES, mask=w_mask, other=0)
                    up_total = add_mxfp4(up_total, low_row, high_row, pair, up_exponents, half, COMPUTE, PTX)
        else:
            group = start // GROUP_SIZE if MANY else 0
            scale = tl.load(gate_scale + group * SCALE_ROWS, mask=is_column, other=0.0)
            if ZEROS:
                gate_zero = tl.load(zero_at + group * ROWS, mask=is_column, other=0).to(tl.int32)
            if GATED:
                scale_of_up = tl.load(up_scale + group * SCALE_ROWS, mask=is_column, other=0.0)
                if ZEROS:
                    up_zero = tl.load(zero_at + group * ROWS + OUT, mask=is_column, other=0).to(tl.int32)
            if KIND == INT4:
                half = tl.arange(0, BLOCK_K // 2)
                k = start + half
                w_mask = is_column[None, :]
                low_mask, high_mask = is_entry[:, None], is_entry[:, None]
                if IN % BLOCK_K != 0:
                    low_mask = low_mask & (k < IN)[None, :]
                    high_mask = high_mask & (k + BLOCK_K // 2 < IN)[None, :]
                low_row = tl.load(x_row + k[None, :], mask=low_mask, other=0)
                high_row = tl.load(x_row + (k + BLOCK_K // 2)[None, :], mask=high_mask, other=0)
                pair_at = w_row + (start // 2 + half)[:, None]
                pair = tl.load(pair_at, mask=w_mask, other=0)
                total = add_int4(total, low_row, high_row, pair, gate_zero, scale, COMPUTE, ROUNDED, PTX)
                if GATED:
                    pair = tl.load(pair_at + OUT * ROW_BYTES, mask=w_mask, other=0)
                    up_total = add_int4(up_total, low_row, high_row, pair, up_zero, scale_of_up, COMPUTE, ROUNDED, PTX)
            else:
                k = start + tl.arange(0, BLOCK_K)
                x_mask, w_mask = is_entry[:, None], is_column[None, :]
                if IN % BLOCK_K != 0:
                    x_mask = x_mask & (k < IN)[None, :]
                    if KIND == FLOAT8:  # rows of integers are whole blocks
                        w_mask = w_mask & (k < IN)[:, None]
                row = tl.load(x_row + k[None, :], mask=x_mask, other=0.0)
                w_at = w_row + k[:, None]
                if KIND == INT8:
                    w = tl.load(w_at, mask=w_mask, other=0)
                    total = add_int8(total, row, w, gate_zero, scale, COMPUTE, ROUNDED)
                    if GATED:
                        w = tl.load(w_at + OUT * ROW_BYTES, mask=w_mask, other=0)
                        up_total = add_int8(up_total, row, w, up_zero, scale_of_up, COMPUTE, ROUNDED)
                else:
                    if ROUNDED and MANY:
                        row_scale = tl.load(x_scale + group * x_scale_group_stride)[:, None]
                    else:
                        row_scale = 1.0
                    if ROUNDED and FP8 > 0:
                        row = widen(row, COMPUTE, FP8)
                    w = tl.load(w_at, mask=w_mask, other=0.0)
                    w = widen(w, COMPUTE, FP8) if FP8 > 0 or not ROUNDED else w
                    total += tl.dot(row, w, input_precision="ieee") * scale[None, :] * row_scale
                    if GATED:
                        w = tl.load(w_at + OUT * ROW_BYTES, mask=w_mask, other=0.0)
                        w = widen(w, COMPUTE, FP8) if FP8 > 0 or not ROUNDED else w
                        up_total += tl.dot(row, w, input_precision="ieee") * scale_of_up[None, :] * row_scale
    if ROUNDED and not (KIND == FLOAT8 and MANY):
        row_scale = tl.load(x_scale)[:, None]
        total *= row_scale
        up_total *= row_scale
    if BIAS:
        added = bias + expert * ROWS + column
        is_added = is_column & (split == 0)
        total += tl.load(added, mask=is_added, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up_total += tl.load(added + OUT, mask=is_added, other=0.0).to(tl.float32)[None, :]
    mask = is_entry[:, None] & is_column[None, :]
    if SPLITS > 1:
        target = out + (split.to(tl.int64) * num_entries + entry)[:, None] * ROWS + column[None, :]
        tl.store(target, total, mask=mask)
        if GATED:
            tl.store(target + OUT, up_total, mask=mask)
    else:
        target = out + entry[:, None] * OUT + column[None, :]
        if GATED:
            total = gated_activation(total, up_total, alpha, limit, CLAMPED, COMPUTE)
        tl.store(target, total.to(COMPUTE), mask=mask)


@triton.jit
def gated_activation(total, up_total, alpha, limit, CLAMPED: tl.constexpr, DTYPE: tl.constexpr):
    """The inner elements, rounded after each step, as a separate product, activation and product would do."""
    gate, up = total.to(DTYPE).to(tl.float32), up_total.to(DTYPE).to(tl.float32)
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        inner = (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
    else:
        inner = activate(gate, SILU).to(DTYPE).to(tl.float32) * up
    return inner


@triton.jit(do_not_specialize=["num_entries"])
def splitk_reduce_act_and_mul(
    out,  # [entries, OUT], contiguous
    parts,  # [SPLITS, entries, 2 * OUT] float32
    num_entries,
    alpha,
    limit,
    OUT: tl.constexpr,
    CLAMPED: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sums of the splits of gate and up, and the gated activation."""
    entry = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < OUT
    gate = tl.zeros([BLOCK], dtype=tl.float32)
    up = tl.zeros([BLOCK], dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        part = parts + (tl.full([], split, tl.int64) * num_entries + entry) * (2 * OUT) + column
        gate += tl.load(part, mask=mask, other=0.0)
        up += tl.load(part + OUT, mask=mask, other=0.0)
    DTYPE: tl.constexpr = out.dtype.element_ty
    inner = gated_activation(gate, up, alpha, limit, CLAMPED, DTYPE)
    tl.store(out + entry * OUT + column, inner.to(DTYPE), mask=mask)


@triton.jit(do_not_specialize=["num_entries"])
def splitk_reduce_moe_sum(
    out,  # [T, SIZE], contiguous
    parts,  # [SPLITS, T * TOP_K, SIZE], contiguous
    shares,  # [T, TOP_K] float32, contiguous
    num_entries,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Weighted sum of the outputs of a token's experts, each the sum of its splits, rounded to the compute dtype."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for which in tl.static_range(TOP_K):
        entry = token * TOP_K + which
        result = tl.zeros([BLOCK], dtype=tl.float32)
        for split in tl.static_range(SPLITS):
            part = parts + (tl.full([], split, tl.int64) * num_entries + entry) * SIZE + column
            result += tl.load(part, mask=mask, other=0.0).to(tl.float32)
        total += result.to(DTYPE).to(tl.float32) * tl.load(shares + entry)
    tl.store(out + token * SIZE + column, total.to(DTYPE), mask=mask)

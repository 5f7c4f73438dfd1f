"""Kernels of products of few rows with 16-bit weights, which read the weight once, as fast as memory delivers it.

    weight  [OUT, IN]  rows as in the checkpoint        program (tile, part): BLOCK_N rows of the weight, and of their
                                                        columns the part's

A program keeps several tiles of the weight on their way from memory to shared memory (num_stages). The columns are
split among programs if there are too few rows for all multiprocessors. The program of a tile that finishes last adds
the partial sums, in the order of the parts, so the result does not depend on which one that is. It also resets the
tile's counter for the next launch, so a captured graph can be replayed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mvllm_triton.kernels.activation import SILU, activate


@triton.jit
def is_last_program(counters, tile, num_parts):
    """Whether this program is the last of its tile; what the others stored before their call is then visible."""
    tl.debug_barrier()  # all threads of this program have stored their partial sums
    arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
    is_last = arrived == num_parts - 1
    if is_last:
        tl.store(counters + tile, 0)
    return is_last


@triton.jit(do_not_specialize=["num_rows", "num_parts", "out_features"])
def skinny_gemm(
    out,  # [num_rows, out_features], contiguous
    x,  # [num_rows, IN]
    weight,  # [out_features, IN]
    bias,  # [out_features], with BIAS
    partial_sums,  # [tiles, num_parts, BLOCK_N, BLOCK_M] float32, with SPLIT
    counters,  # [tiles] int32, zeros before and after, with SPLIT
    num_rows,
    out_features,
    in_features,
    num_parts,
    part_size,  # columns per part, a multiple of BLOCK_K
    x_stride,
    weight_stride,
    BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN_N: tl.constexpr,  # BLOCK_N divides out_features
    EVEN_K: tl.constexpr,  # BLOCK_K divides in_features
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Tiles of the weight times the transposed rows, with matrix instructions."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    tile, part = tl.program_id(0), tl.program_id(1)
    row, place, inner = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    column = tile * BLOCK_N + place
    is_row, is_column = row < num_rows, column < out_features
    first = part * part_size
    stop = tl.minimum(first + part_size, in_features)
    weight += tile.to(tl.int64) * BLOCK_N * weight_stride
    w_at = weight + place[:, None] * weight_stride + inner[None, :]
    x_at = x + row[None, :] * x_stride + inner[:, None]
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for start in tl.range(first, stop, BLOCK_K):
        if EVEN_K:
            x_mask = is_row[None, :]
            w_mask = None if EVEN_N else is_column[:, None]
        else:
            is_inner = start + inner < in_features
            x_mask = is_row[None, :] & is_inner[:, None]
            w_mask = is_inner[None, :] if EVEN_N else is_column[:, None] & is_inner[None, :]
        if EVEN_K and EVEN_N:
            w = tl.load(w_at + start)
        else:
            w = tl.load(w_at + start, mask=w_mask, other=0.0)
        total = tl.dot(w, tl.load(x_at + start, mask=x_mask, other=0.0), total)
    if SPLIT:
        sums = partial_sums + tile * num_parts * BLOCK_N * BLOCK_M + place[:, None] * BLOCK_M + row[None, :]
        tl.store(sums + part * BLOCK_N * BLOCK_M, total)
        if is_last_program(counters, tile, num_parts):
            total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
            for each in tl.range(0, num_parts):
                total += tl.load(sums + each * BLOCK_N * BLOCK_M, cache_modifier=".cg")
            if BIAS:
                total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[:, None]
            target = out + row[None, :] * out_features + column[:, None]
            tl.store(target, total.to(DTYPE), mask=is_row[None, :] & is_column[:, None])
    else:
        if BIAS:
            total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[:, None]
        target = out + row[None, :] * out_features + column[:, None]
        tl.store(target, total.to(DTYPE), mask=is_row[None, :] & is_column[:, None])


@triton.jit(do_not_specialize=["num_parts", "out_features"])
def gemv(
    out,  # [out_features]
    x,  # [in_features]
    weight,  # [out_features, in_features]
    bias,  # [out_features], with BIAS
    partial_sums,  # [tiles, num_parts, BLOCK_N] float32, with SPLIT
    counters,  # [tiles] int32, zeros before and after, with SPLIT
    out_features,
    in_features,
    num_parts,
    part_size,
    weight_stride,
    BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Tiles of the weight times one row, with multiply-adds; the sums of each thread are added at the end."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    tile, part = tl.program_id(0), tl.program_id(1)
    place, inner = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    column = tile * BLOCK_N + place
    is_column = column < out_features
    first = part * part_size
    stop = tl.minimum(first + part_size, in_features)
    weight += tile.to(tl.int64) * BLOCK_N * weight_stride
    w_at = weight + place[:, None] * weight_stride + inner[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for start in tl.range(first, stop, BLOCK_K, num_stages=STAGES):
        if EVEN_K and EVEN_N:
            w = tl.load(w_at + start)
            value = tl.load(x + start + inner)
        else:
            is_inner = start + inner < in_features
            w = tl.load(w_at + start, mask=is_column[:, None] & is_inner[None, :], other=0.0)
            value = tl.load(x + start + inner, mask=is_inner, other=0.0)
        sums += w.to(tl.float32) * value.to(tl.float32)[None, :]
    total = tl.sum(sums, 1)
    if SPLIT:
        found = partial_sums + tile * num_parts * BLOCK_N + place
        tl.store(found + part * BLOCK_N, total)
        if is_last_program(counters, tile, num_parts):
            total = tl.zeros([BLOCK_N], dtype=tl.float32)
            for each in tl.range(0, num_parts):
                total += tl.load(found + each * BLOCK_N, cache_modifier=".cg")
            if BIAS:
                total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
            tl.store(out + column, total.to(DTYPE), mask=is_column)
    else:
        if BIAS:
            total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
        tl.store(out + column, total.to(DTYPE), mask=is_column)


@triton.jit
def silu_and_mul_of_sums(
    gate, up, bias, column, is_column, out_features, BIAS: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr
):
    """silu(gate) * up of float32 sums, each step rounded as in the separate operations; ROWS adds a last dimension."""
    if BIAS:
        gate_bias = tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
        up_bias = tl.load(bias + out_features + column, mask=is_column, other=0.0).to(tl.float32)
        gate += gate_bias[:, None] if ROWS else gate_bias
        up += up_bias[:, None] if ROWS else up_bias
    active = activate(gate.to(DTYPE).to(tl.float32), SILU).to(DTYPE).to(tl.float32)
    return (active * up.to(DTYPE).to(tl.float32)).to(DTYPE)


@triton.jit(do_not_specialize=["num_rows", "out_features"])
def skinny_gemm_silu_and_mul(
    out,  # [num_rows, out_features], contiguous
    x,  # [num_rows, in_features]
    weight,  # [2 * out_features, in_features], gate rows first
    bias,  # [2 * out_features], with BIAS
    num_rows,
    out_features,
    in_features,
    x_stride,
    weight_stride,
    BIAS: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """As `skinny_gemm`, of the same rows of both halves of the weight, and then the activation."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    tile = tl.program_id(0)
    row, place, inner = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    column = tile * BLOCK_N + place
    is_row, is_column = row < num_rows, column < out_features
    weight += tile.to(tl.int64) * BLOCK_N * weight_stride
    gate_at = weight + place[:, None] * weight_stride + inner[None, :]
    up_at = gate_at + out_features.to(tl.int64) * weight_stride
    x_at = x + row[None, :] * x_stride + inner[:, None]
    gate = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for start in tl.range(0, in_features, BLOCK_K):
        if EVEN_K and EVEN_N:
            value = tl.load(x_at + start, mask=is_row[None, :], other=0.0)
            gate = tl.dot(tl.load(gate_at + start), value, gate)
            up = tl.dot(tl.load(up_at + start), value, up)
        else:
            is_inner = start + inner < in_features
            mask = is_column[:, None] & is_inner[None, :]
            value = tl.load(x_at + start, mask=is_row[None, :] & is_inner[:, None], other=0.0)
            gate = tl.dot(tl.load(gate_at + start, mask=mask, other=0.0), value, gate)
            up = tl.dot(tl.load(up_at + start, mask=mask, other=0.0), value, up)
    result = silu_and_mul_of_sums(gate, up, bias, column, is_column, out_features, BIAS, True, DTYPE)
    target = out + row[None, :] * out_features + column[:, None]
    tl.store(target, result, mask=is_row[None, :] & is_column[:, None])


@triton.jit(do_not_specialize=["out_features"])
def gemv_silu_and_mul(
    out,  # [out_features]
    x,  # [in_features]
    weight,  # [2 * out_features, in_features], gate rows first
    bias,  # [2 * out_features], with BIAS
    out_features,
    in_features,
    weight_stride,
    BIAS: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """As `gemv`, of the same rows of both halves of the weight, and then the activation."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    tile = tl.program_id(0)
    place, inner = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    column = tile * BLOCK_N + place
    is_column = column < out_features
    weight += tile.to(tl.int64) * BLOCK_N * weight_stride
    gate_at = weight + place[:, None] * weight_stride + inner[None, :]
    up_at = gate_at + out_features.to(tl.int64) * weight_stride
    gate_sums = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    up_sums = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for start in tl.range(0, in_features, BLOCK_K, num_stages=STAGES):
        if EVEN_K and EVEN_N:
            gate = tl.load(gate_at + start)
            up = tl.load(up_at + start)
            value = tl.load(x + start + inner)
        else:
            is_inner = start + inner < in_features
            mask = is_column[:, None] & is_inner[None, :]
            gate = tl.load(gate_at + start, mask=mask, other=0.0)
            up = tl.load(up_at + start, mask=mask, other=0.0)
            value = tl.load(x + start + inner, mask=is_inner, other=0.0)
        wide = value.to(tl.float32)[None, :]
        gate_sums += gate.to(tl.float32) * wide
        up_sums += up.to(tl.float32) * wide
    gate_total, up_total = tl.sum(gate_sums, 1), tl.sum(up_sums, 1)
    result = silu_and_mul_of_sums(gate_total, up_total, bias, column, is_column, out_features, BIAS, False, DTYPE)
    tl.store(out + column, result, mask=is_column)

"""Kernels of mixture of experts: tokens are sorted by expert, and each expert multiplies its own tokens.

    entry    a token and one of its experts: token * TOP_K + index of the expert among them
    order    entries of expert 0, then of expert 1, ...; each expert's run is padded to whole tiles of BLOCK_M rows
    tiles    the expert of each tile; -1 for unused tiles

The host does not know the number of tiles, so grids have the maximum size.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mvllm_triton.kernels.activation import SILU, activate


@triton.jit(do_not_specialize=["num_entries"])
def count(counts, expert_ids, num_entries, BLOCK: tl.constexpr):
    """Counts the entries of each expert: [experts] int32. One program per expert."""
    expert = tl.program_id(0)
    found = tl.zeros([BLOCK], dtype=tl.int32)
    for start in tl.range(0, num_entries, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        chosen = tl.load(expert_ids + entry, mask=entry < num_entries, other=-1)
        found += (chosen == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, 0))


@triton.jit(do_not_specialize=["num_entries", "max_tiles"])
def arrange(
    order,  # [max_tiles * BLOCK_M] int32: entries; `num_entries` for padding
    tiles,  # [max_tiles] int32
    counts,
    expert_ids,
    num_entries,
    max_tiles,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Orders entries by expert. One program per expert writes the run of that expert."""
    expert = tl.program_id(0)
    each = tl.arange(0, EXPERTS_PAD)
    tiles_of_each = (tl.load(counts + each, mask=each < NUM_EXPERTS, other=0) + BLOCK_M - 1) // BLOCK_M
    first_tile = tl.sum(tl.where(each < expert, tiles_of_each, 0), 0)
    num_tiles = tl.sum(tl.where(each == expert, tiles_of_each, 0), 0)
    place = first_tile * BLOCK_M
    end = place + num_tiles * BLOCK_M
    for start in tl.range(0, num_entries, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        chosen = tl.load(expert_ids + entry, mask=entry < num_entries, other=-1)
        is_own = (chosen == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(is_own, 0) - 1, entry, mask=is_own > 0)
        place += tl.sum(is_own, 0)
    rest = place + tl.arange(0, BLOCK_M)
    tl.store(order + rest, tl.zeros([BLOCK_M], dtype=tl.int32) + num_entries, mask=rest < end)
    for start in tl.range(0, num_tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        tl.store(tiles + first_tile + tile, tl.zeros([BLOCK], dtype=tl.int32) + expert, mask=tile < num_tiles)
    if expert == NUM_EXPERTS - 1:
        for start in tl.range(first_tile + num_tiles, max_tiles, BLOCK):
            tile = start + tl.arange(0, BLOCK)
            tl.store(tiles + tile, tl.full([BLOCK], -1, dtype=tl.int32), mask=tile < max_tiles)


@triton.jit(do_not_specialize=["num_entries", "max_tiles"])
def multiply(
    out,  # [entries, OUT], contiguous
    x,  # [entries / TOP_K, IN]
    weight,  # [experts, OUT, IN], or [experts, 2 * OUT, IN] with GATED; contiguous
    bias,  # [experts, OUT or 2 * OUT]
    order,
    tiles,
    num_entries,
    max_tiles,
    x_stride,
    alpha,
    limit,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    TOP_K: tl.constexpr,  # 1 if there is a row for each entry
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Rows of `x` times the weights of their experts; with GATED, followed by the gated activation."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    ROWS: tl.constexpr = 2 * OUT if GATED else OUT
    tile = tl.program_id(0)  # adjacent tiles often share an expert and its weights
    expert = tl.load(tiles + tile).to(tl.int64)
    if expert < 0:
        return
    entry = tl.load(order + tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    is_entry = entry < num_entries
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < OUT
    inner = tl.arange(0, BLOCK_K)
    x_row = x + (entry // TOP_K)[:, None] * x_stride
    weight_row = weight + expert * (ROWS * IN) + column[None, :].to(tl.int64) * IN
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    if GATED:
        up_total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in tl.range(0, IN, BLOCK_K):
        k = start + inner
        x_mask, weight_mask = is_entry[:, None], is_column[None, :]
        if IN % BLOCK_K != 0:
            x_mask = x_mask & (k < IN)[None, :]
            weight_mask = weight_mask & (k < IN)[:, None]
        row = tl.load(x_row + k[None, :], mask=x_mask, other=0.0)
        w = tl.load(weight_row + k[:, None], mask=weight_mask, other=0.0)
        total = tl.dot(row, w, total, input_precision="ieee")
        if GATED:
            w = tl.load(weight_row + OUT * IN + k[:, None], mask=weight_mask, other=0.0)
            up_total = tl.dot(row, w, up_total, input_precision="ieee")
    if BIAS:
        added = bias + expert * ROWS + column
        total += tl.load(added, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up_total += tl.load(added + OUT, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if GATED:
        # Rounded after each step, as a separate product, activation and product would do.
        gate, up = total.to(DTYPE).to(tl.float32), up_total.to(DTYPE).to(tl.float32)
        if CLAMPED:
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit)
            total = (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
        else:
            total = activate(gate, SILU).to(DTYPE).to(tl.float32) * up
    target = out + entry[:, None] * OUT + column[None, :]
    tl.store(target, total.to(DTYPE), mask=is_entry[:, None] & is_column[None, :])


@triton.jit
def add_up(
    out,  # [T, SIZE], contiguous
    parts,  # [T, TOP_K, SIZE], contiguous
    shares,  # [T, TOP_K] float32, contiguous
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Weighted sum of the outputs of a token's experts."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for which in tl.static_range(TOP_K):
        part = tl.load(parts + (token * TOP_K + which) * SIZE + column, mask=mask, other=0.0)
        total += part.to(tl.float32) * tl.load(shares + token * TOP_K + which)
    tl.store(out + token * SIZE + column, total.to(out.dtype.element_ty), mask=mask)

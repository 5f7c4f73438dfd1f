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
def moe_align_block_size_count(
    counts, expert_ids, num_entries, NUM_EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, BLOCK: tl.constexpr
):
    """Counts the entries of each expert in one piece of BLOCK entries: counts are [pieces, NUM_EXPERTS] int32."""
    piece = tl.program_id(0)
    entry = piece * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(expert_ids + entry, mask=entry < num_entries, other=-1).to(tl.int32)
    each = tl.arange(0, EXPERTS_PAD)
    found = tl.sum((chosen[:, None] == each[None, :]).to(tl.int32), 0)
    tl.store(counts + piece * NUM_EXPERTS + each, found, mask=each < NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_pieces"])
def moe_align_block_size_scan(
    counts, num_pieces, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, PIECES: tl.constexpr
):
    """Replaces each piece's counts by the sums of the pieces before it, and stores the sums of all after the last.

    Each program does EXPERTS experts, PIECES pieces at a time, so that every count is read once.
    """
    each = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    before = tl.zeros([EXPERTS], dtype=tl.int32)
    for start in tl.range(0, num_pieces, PIECES):
        piece = start + tl.arange(0, PIECES)
        place = counts + piece[:, None] * NUM_EXPERTS + each[None, :]
        mask = (piece < num_pieces)[:, None] & (each < NUM_EXPERTS)[None, :]
        found = tl.load(place, mask=mask, other=0)
        tl.store(place, before[None, :] + tl.cumsum(found, 0) - found, mask=mask)
        before += tl.sum(found, 0)
    tl.store(counts + num_pieces * NUM_EXPERTS + each, before, mask=each < NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_entries", "num_pieces", "max_tiles"])
def moe_align_block_size_sort(
    order,  # [max_tiles * BLOCK_M] int32: entries; `num_entries` for padding
    tiles,  # [max_tiles] int32
    earlier,  # [pieces + 1, NUM_EXPERTS] int32, from moe_align_block_size_scan
    expert_ids,
    num_entries,
    num_pieces,
    max_tiles,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Orders entries by expert, and an expert's entries as they were.

    The first `num_pieces` programs each place the entries of one piece. The others each write the tiles and the padding
    of one expert's run.
    """
    program = tl.program_id(0)
    each = tl.arange(0, EXPERTS_PAD)
    is_expert = each < NUM_EXPERTS
    total = tl.load(earlier + num_pieces * NUM_EXPERTS + each, mask=is_expert, other=0)
    tiles_of_each = (total + BLOCK_M - 1) // BLOCK_M
    first_of_each = tl.cumsum(tiles_of_each, 0) - tiles_of_each
    if program < num_pieces:
        entry = program * BLOCK + tl.arange(0, BLOCK)
        chosen = tl.load(expert_ids + entry, mask=entry < num_entries, other=-1).to(tl.int32)
        is_own = chosen[:, None] == each[None, :]
        before = tl.load(earlier + program * NUM_EXPERTS + each, mask=is_expert, other=0)
        rank = tl.cumsum(is_own.to(tl.int32), 0) - 1 + (first_of_each * BLOCK_M + before)[None, :]
        place = tl.sum(tl.where(is_own, rank, 0), 1)
        is_placed = (entry < num_entries) & (chosen >= 0) & (chosen < NUM_EXPERTS)
        tl.store(order + place, entry, mask=is_placed)
    else:
        expert = program - num_pieces
        first_tile = tl.sum(tl.where(each == expert, first_of_each, 0), 0)
        num_tiles = tl.sum(tl.where(each == expert, tiles_of_each, 0), 0)
        used = tl.sum(tl.where(each == expert, total, 0), 0)
        rest = used + tl.arange(0, BLOCK_M)
        padding = tl.zeros([BLOCK_M], dtype=tl.int32) + num_entries
        tl.store(order + first_tile * BLOCK_M + rest, padding, mask=rest < num_tiles * BLOCK_M)
        for start in tl.range(0, num_tiles, BLOCK):
            tile = start + tl.arange(0, BLOCK)
            tl.store(tiles + first_tile + tile, tl.zeros([BLOCK], dtype=tl.int32) + expert, mask=tile < num_tiles)
        if expert == NUM_EXPERTS - 1:
            for start in tl.range(first_tile + num_tiles, max_tiles, BLOCK):
                tile = start + tl.arange(0, BLOCK)
                tl.store(tiles + tile, tl.full([BLOCK], -1, dtype=tl.int32), mask=tile < max_tiles)


@triton.jit(do_not_specialize=["num_entries", "max_tiles"])
def fused_moe(
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
def moe_sum(
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

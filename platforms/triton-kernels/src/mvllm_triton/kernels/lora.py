"""Kernels of LoRA adapters: each token's row times the matrices of the slot of its adapter, in two launches.

    lora_shrink   x [T, in] times down[slot] [blocks, rank, in]               in parts of `in`, as float32
    lora_expand   the sum of the parts times up[slot] [out, rank], added to y

A program has a tile of adjacent tokens. It multiplies the whole tile by the matrices of each slot that occurs in the
tile, with zeros in the rows of other slots. Tokens of one prompt are adjacent, so a tile of a prefill has one slot.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["slots", "num_tokens", "split_size"])
def lora_shrink(
    shrunk,  # [splits, T, BLOCKS * RANK] float32, contiguous
    x,  # [T, IN]
    down,  # [NUM_SLOTS, BLOCKS, RANK, IN], contiguous
    slots,  # [T]
    num_tokens,
    x_stride,
    split_size,
    NUM_SLOTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    IN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    block, split = tl.program_id(1), tl.program_id(2)
    is_token = token < num_tokens
    slot = tl.load(slots + token, mask=is_token, other=-1)
    if tl.max(slot, 0) < 0:
        return
    rank = tl.arange(0, RANK_PAD)
    first = split * split_size
    last = tl.minimum(first + split_size, IN)
    x_row = x + token.to(tl.int64)[:, None] * x_stride
    matrix = down + block * (RANK * IN)
    total = tl.zeros([BLOCK_M, RANK_PAD], dtype=tl.float32)
    for wanted in tl.range(0, NUM_SLOTS):
        is_own = slot == wanted
        if tl.max(is_own.to(tl.int32), 0) > 0:
            for start in tl.range(first, last, BLOCK_K):
                k = start + tl.arange(0, BLOCK_K)
                row = tl.load(x_row + k[None, :], mask=is_own[:, None] & (k < last)[None, :], other=0.0)
                weight_mask = (rank < RANK)[None, :] & (k < last)[:, None]
                weight = tl.load(matrix + rank[None, :] * IN + k[:, None], mask=weight_mask, other=0.0)
                total = tl.dot(row, weight, total, input_precision="ieee")
        matrix += BLOCKS * RANK * IN
    target = shrunk + (split * num_tokens + token).to(tl.int64)[:, None] * (BLOCKS * RANK) + block * RANK
    tl.store(target + rank[None, :], total, mask=is_token[:, None] & (rank < RANK)[None, :])


@triton.jit(do_not_specialize=["slots", "num_tokens", "num_splits"])
def lora_expand(
    y,  # [T, out]
    shrunk,
    up,  # [NUM_SLOTS, out, RANK], contiguous
    slots,
    columns,  # [column tiles, 3] int32: first column, end of the band, block
    num_tokens,
    y_stride,
    num_splits,
    OUT: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    DTYPE: tl.constexpr = up.dtype.element_ty
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_token = token < num_tokens
    slot = tl.load(slots + token, mask=is_token, other=-1)
    if tl.max(slot, 0) < 0:
        return
    entry = columns + tl.program_id(1) * 3
    column = tl.load(entry) + tl.arange(0, BLOCK_N)
    is_column = column < tl.load(entry + 1)
    block = tl.load(entry + 2)
    rank = tl.arange(0, RANK_PAD)
    is_rank = rank < RANK
    mask = (slot >= 0)[:, None] & is_rank[None, :]
    part = tl.zeros([BLOCK_M, RANK_PAD], dtype=tl.float32)
    for split in tl.range(0, num_splits):
        source = shrunk + (split * num_tokens + token).to(tl.int64)[:, None] * (BLOCKS * RANK) + block * RANK
        part += tl.load(source + rank[None, :], mask=mask, other=0.0)
    matrix = up
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for wanted in tl.range(0, NUM_SLOTS):
        is_own = slot == wanted
        if tl.max(is_own.to(tl.int32), 0) > 0:
            weight_mask = is_rank[:, None] & is_column[None, :]
            weight = tl.load(matrix + column[None, :] * RANK + rank[:, None], mask=weight_mask, other=0.0)
            row = tl.where(is_own[:, None], part, 0.0).to(DTYPE)
            total = tl.dot(row, weight, total, input_precision="ieee")
        matrix += OUT * RANK
    target = y + token.to(tl.int64)[:, None] * y_stride + column[None, :]
    mask = (slot >= 0)[:, None] & is_column[None, :]
    result = tl.load(target, mask=mask, other=0.0).to(tl.float32) + total
    tl.store(target, result.to(y.dtype.element_ty), mask=mask)

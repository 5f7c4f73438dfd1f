"""Kernel of rotary position embedding in place: a program rotates some query and key heads of one token."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotate(heads, head, head_stride, cos, sin, NUM_HEADS: tl.constexpr, HALF: tl.constexpr, PAD: tl.constexpr):
    """Rotates heads of one token, [NUM_HEADS, ...], by the angles with the given cosines and sines."""
    pair = tl.arange(0, PAD)
    mask = (head < NUM_HEADS)[:, None] & (pair < HALF)[None, :]
    first = heads + head[:, None] * head_stride + pair[None, :]
    a = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(first + HALF, mask=mask, other=0.0).to(tl.float32)
    c, s = cos[None, :], sin[None, :]
    tl.store(first, (a * c - b * s).to(heads.dtype.element_ty), mask=mask)
    tl.store(first + HALF, (b * c + a * s).to(heads.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["index"])  # its alignment in a step's buffer varies
def rotary_embedding(
    index,  # [T]
    query,  # [T, NUM_HEADS, head_size]
    key,  # [T, NUM_KV_HEADS, head_size]
    cos_sin,  # [rows, 2 * HALF]
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    angles_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    QUERY_TILES: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    angles = cos_sin + tl.load(index + token).to(tl.int64) * angles_stride
    pair = tl.arange(0, PAD)
    cos = tl.load(angles + pair, mask=pair < HALF, other=0.0)
    sin = tl.load(angles + HALF + pair, mask=pair < HALF, other=0.0)
    if tile < QUERY_TILES:
        head = tile * BLOCK_H + tl.arange(0, BLOCK_H)
        rotate(query + token * query_token_stride, head, query_head_stride, cos, sin, NUM_HEADS, HALF, PAD)
    else:
        head = (tile - QUERY_TILES) * BLOCK_H + tl.arange(0, BLOCK_H)
        rotate(key + token * key_token_stride, head, key_head_stride, cos, sin, NUM_KV_HEADS, HALF, PAD)

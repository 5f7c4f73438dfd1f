"""Kernel that norms and rotates queries and keys, and stores keys and values in a paged cache, in one launch.

A program has some heads of one token: query heads, or key heads and the value heads of the same index. A head is held
in three parts, so that a rotation needs no exchange between threads:

    head          [ a₀ a₁ … | b₀ b₁ … | rest ]        interleaved    [ a₀ b₀ a₁ b₁ … | rest ]
    result        [ a'      | b'      | rest ]        likewise
"""

from __future__ import annotations

import triton
import triton.language as tl

from mvllm_triton.kernels.numbers import float8_codes, int8_codes
from mvllm_triton.kernels.reshape_and_cache import store_heads


@triton.jit
def rotated_heads(
    x,  # a token's heads: [NUM_HEADS, SIZE]
    weight,  # [SIZE], of the norm
    eps,
    cos,  # [HALF_PAD] float32
    sin,
    head,
    head_stride,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
):
    """The three parts of some heads after norm and rotation: float32 values that the dtype of `x` holds."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    pair = tl.arange(0, HALF_PAD)
    first = pair * 2 if INTERLEAVED else pair
    second = first + (1 if INTERLEAVED else HALF)
    rest = 2 * HALF + tl.arange(0, REST_PAD)
    is_pair, is_rest = pair < HALF, rest < SIZE
    row = x + head[:, None] * head_stride
    is_head = (head < NUM_HEADS)[:, None]
    a = tl.load(row + first[None, :], mask=is_head & is_pair[None, :], other=0.0).to(tl.float32)
    b = tl.load(row + second[None, :], mask=is_head & is_pair[None, :], other=0.0).to(tl.float32)
    c = tl.load(row + rest[None, :], mask=is_head & is_rest[None, :], other=0.0).to(tl.float32)
    if NORM:
        inverse = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(c * c, 1)) / SIZE + eps)[:, None]
        a_weight = tl.load(weight + first, mask=is_pair, other=0.0).to(tl.float32)[None, :]
        b_weight = tl.load(weight + second, mask=is_pair, other=0.0).to(tl.float32)[None, :]
        c_weight = tl.load(weight + rest, mask=is_rest, other=0.0).to(tl.float32)[None, :]
        # Rounded as a separate norm does, before and after the product with the weight.
        a = ((a * inverse).to(DTYPE).to(tl.float32) * a_weight).to(DTYPE).to(tl.float32)
        b = ((b * inverse).to(DTYPE).to(tl.float32) * b_weight).to(DTYPE).to(tl.float32)
        c = ((c * inverse).to(DTYPE).to(tl.float32) * c_weight).to(DTYPE).to(tl.float32)
    cos, sin = cos[None, :], sin[None, :]
    turned = (a * cos - b * sin).to(DTYPE).to(tl.float32)
    return turned, (b * cos + a * sin).to(DTYPE).to(tl.float32), c


@triton.jit
def store_part(target, wide, mask, FP8: tl.constexpr, SCALED: tl.constexpr):
    """Stores float32 values in the dtype of the target, or (SCALED) as 8-bit codes."""
    if SCALED:
        codes = float8_codes(wide, FP8) if FP8 > 0 else int8_codes(wide)
        tl.store(target, codes, mask=mask)
    else:
        tl.store(target, wide.to(target.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["index", "slot_mapping"])  # their alignment in a step's buffer varies
def rotary_embedding_and_cache(
    out,  # [T, NUM_HEADS, SIZE]: rotated queries; may be `query` if not INTERLEAVED
    query,  # [T, NUM_HEADS, SIZE]
    key,  # [T, NUM_KV_HEADS, SIZE]
    value,  # [T, NUM_KV_HEADS, VALUE_SIZE]
    key_cache,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, SIZE]
    value_cache,
    key_scales,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS] float32; unused if not SCALED
    value_scales,
    index,  # [T]
    slot_mapping,  # [T]
    cos_sin,  # [rows, 2 * HALF] float32
    query_weight,  # [SIZE]; unused if not NORM
    key_weight,
    eps,
    out_token_stride,
    out_head_stride,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    angles_stride,
    key_block_stride,
    key_slot_stride,
    key_cache_head_stride,
    value_block_stride,
    value_slot_stride,
    value_cache_head_stride,
    key_scale_block_stride,
    key_scale_slot_stride,
    key_scale_head_stride,
    value_scale_block_stride,
    value_scale_slot_stride,
    value_scale_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    FP8: tl.constexpr,
    LARGEST: tl.constexpr,
):
    QUERY_TILES: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    pair = tl.arange(0, HALF_PAD)
    rest = 2 * HALF + tl.arange(0, REST_PAD)
    is_pair, is_rest = (pair < HALF)[None, :], (rest < SIZE)[None, :]
    angles = cos_sin + tl.load(index + token).to(tl.int64) * angles_stride
    cos = tl.load(angles + pair, mask=pair < HALF, other=0.0)
    sin = tl.load(angles + HALF + pair, mask=pair < HALF, other=0.0)
    if tile < QUERY_TILES:
        head = tile * BLOCK_H + tl.arange(0, BLOCK_H)
        row = query + token * query_token_stride
        a, b, c = rotated_heads(
            row, query_weight, eps, cos, sin, head, query_head_stride,
            NUM_HEADS, SIZE, HALF, HALF_PAD, REST_PAD, INTERLEAVED, NORM,
        )  # fmt: skip
        target = out + token * out_token_stride + head[:, None] * out_head_stride
        is_head = (head < NUM_HEADS)[:, None]
        store_part(target + pair[None, :], a, is_head & is_pair, 0, False)
        store_part(target + HALF + pair[None, :], b, is_head & is_pair, 0, False)
        store_part(target + rest[None, :], c, is_head & is_rest, 0, False)
    else:
        place = tl.load(slot_mapping + token)
        if place >= 0:
            block, slot = (place // BLOCK_SIZE).to(tl.int64), place % BLOCK_SIZE
            head = (tile - QUERY_TILES) * BLOCK_H + tl.arange(0, BLOCK_H)
            row = key + token * key_token_stride
            a, b, c = rotated_heads(
                row, key_weight, eps, cos, sin, head, key_head_stride,
                NUM_KV_HEADS, SIZE, HALF, HALF_PAD, REST_PAD, INTERLEAVED, NORM,
            )  # fmt: skip
            is_head = (head < NUM_KV_HEADS)[:, None]
            if SCALED:
                is_nan = tl.maximum(tl.max((a != a).to(tl.int32), 1), tl.max((b != b).to(tl.int32), 1))
                is_nan = tl.maximum(is_nan, tl.max((c != c).to(tl.int32), 1))
                found = tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1))
                found = tl.maximum(found, tl.max(tl.abs(c), 1)) / LARGEST
                found = tl.where(is_nan > 0, float("nan"), found)
                scales = key_scales + block * key_scale_block_stride + slot * key_scale_slot_stride
                tl.store(scales + head * key_scale_head_stride, found, mask=head < NUM_KV_HEADS)
                divisor = tl.where(found > 0.0, found, 1.0)[:, None]
                a, b, c = a / divisor, b / divisor, c / divisor
            target = key_cache + block * key_block_stride + slot * key_slot_stride
            target += head[:, None] * key_cache_head_stride
            store_part(target + pair[None, :], a, is_head & is_pair, FP8, SCALED)
            store_part(target + HALF + pair[None, :], b, is_head & is_pair, FP8, SCALED)
            store_part(target + rest[None, :], c, is_head & is_rest, FP8, SCALED)
            store_heads(
                value + token * value_token_stride,
                value_cache + block * value_block_stride + slot * value_slot_stride,
                value_scales + block * value_scale_block_stride + slot * value_scale_slot_stride,
                0.0,
                head,
                value_head_stride,
                value_cache_head_stride,
                value_scale_head_stride,
                NUM_KV_HEADS,
                VALUE_SIZE,
                VALUE_PAD,
                2 if SCALED else 0,
                FP8,
                LARGEST,
            )

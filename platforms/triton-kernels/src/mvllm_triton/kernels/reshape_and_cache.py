"""Kernels that write a step's keys and values, or latents, to cache slots: one program per token and group of heads."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from mvllm_triton.kernels.numbers import float8_codes, int8_codes


@triton.jit
def store_heads(
    x,  # a token's heads: [kv_heads, SIZE]
    cache,  # its slot's heads
    scales,  # its slot's scales, or the one scale of all
    scale,
    head,
    x_head_stride,
    cache_head_stride,
    scale_head_stride,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
    SCALES: tl.constexpr,
    FP8: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Stores heads unquantized, or (LARGEST > 0) divided by a scale and rounded to 8-bit codes."""
    dim = tl.arange(0, PAD)
    is_head = head < NUM_HEADS
    mask = is_head[:, None] & (dim < SIZE)[None, :]
    row = tl.load(x + head[:, None] * x_head_stride + dim[None, :], mask=mask, other=0.0)
    target = cache + head[:, None] * cache_head_stride + dim[None, :]
    if LARGEST > 0.0:
        wide = row.to(tl.float32)
        if SCALES == 2:
            no_number = tl.max((wide != wide).to(tl.int32), 1) > 0
            found = tl.max(tl.abs(wide), 1) / LARGEST
            found = tl.where(no_number, float("nan"), found)
            tl.store(scales + head * scale_head_stride, found, mask=is_head)
            wide = wide / tl.where(found > 0.0, found, 1.0)[:, None]
        elif SCALES == 1:
            wide = wide / tl.load(scales)
        else:
            wide = wide / scale
        codes = float8_codes(wide, FP8) if FP8 > 0 else int8_codes(wide)
        tl.store(target, codes, mask=mask)
    else:
        tl.store(target, row.to(cache.dtype.element_ty), mask=mask)


def _kernel_name(specialization: Any) -> str:
    """The name of the compiled kernel, which profilers print."""
    return "reshape_and_cache" if specialization.constants["VALUE_SIZE"] else "reshape_and_cache_mla"


@triton.jit(repr=_kernel_name, do_not_specialize=["slot_mapping"])  # its alignment in a step's buffer varies
def reshape_and_cache(
    keys,  # [T, kv_heads, KEY_SIZE]
    values,  # [T, kv_heads, VALUE_SIZE]; unused with VALUE_SIZE 0
    key_cache,  # [num_blocks, BLOCK_SIZE, kv_heads, KEY_SIZE]
    value_cache,
    key_scales,
    value_scales,
    slot_mapping,  # [T]
    key_scale,
    value_scale,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
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
    KEY_SIZE: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    SCALES: tl.constexpr,
    FP8: tl.constexpr,
    LARGEST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(slot_mapping + token)
    if place < 0:
        return
    block = (place // BLOCK_SIZE).to(tl.int64)
    slot = place % BLOCK_SIZE
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    store_heads(
        keys + token * key_token_stride,
        key_cache + block * key_block_stride + slot * key_slot_stride,
        key_scales + block * key_scale_block_stride + slot * key_scale_slot_stride,
        key_scale,
        head,
        key_head_stride,
        key_cache_head_stride,
        key_scale_head_stride,
        NUM_HEADS,
        KEY_SIZE,
        KEY_PAD,
        SCALES,
        FP8,
        LARGEST,
    )
    if VALUE_SIZE > 0:
        store_heads(
            values + token * value_token_stride,
            value_cache + block * value_block_stride + slot * value_slot_stride,
            value_scales + block * value_scale_block_stride + slot * value_scale_slot_stride,
            value_scale,
            head,
            value_head_stride,
            value_cache_head_stride,
            value_scale_head_stride,
            NUM_HEADS,
            VALUE_SIZE,
            VALUE_PAD,
            SCALES,
            FP8,
            LARGEST,
        )

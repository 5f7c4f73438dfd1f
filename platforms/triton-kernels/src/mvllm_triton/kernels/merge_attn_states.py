"""Kernel that merges attention over two sets of keys."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["first_head_stride", "second_head_stride"])
def merge_attn_states(
    out,  # [num_tokens, heads, SIZE]
    first,  # likewise: attention over the first keys
    first_sums,  # float32 [heads, num_tokens]: logarithms of the sums of exponentials
    second,
    second_sums,
    out_token_stride,
    out_head_stride,
    first_token_stride,
    first_head_stride,
    second_token_stride,
    second_head_stride,
    first_sums_stride,
    second_sums_stride,
    num_heads,
    HEADS: tl.constexpr,  # per program
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, PAD)
    is_head = head < num_heads
    mask = is_head[:, None] & (column < SIZE)[None, :]
    a = tl.load(first_sums + head * first_sums_stride + token, mask=is_head, other=0.0)
    b = tl.load(second_sums + head * second_sums_stride + token, mask=is_head, other=0.0)
    share = 1.0 / (1.0 + tl.exp(b - a))  # of the first keys
    place = token * first_token_stride + head[:, None] * first_head_stride + column[None, :]
    x = tl.load(first + place, mask=mask, other=0.0).to(tl.float32)
    place = token * second_token_stride + head[:, None] * second_head_stride + column[None, :]
    y = tl.load(second + place, mask=mask, other=0.0).to(tl.float32)
    merged = y + (x - y) * share[:, None]
    place = token * out_token_stride + head[:, None] * out_head_stride + column[None, :]
    tl.store(out + place, merged.to(out.dtype.element_ty), mask=mask)

"""Rotary position embedding."""

from __future__ import annotations

import torch

from mvllm_triton.kernels import rotary_embedding as kernels
from mvllm_triton.tiles import power_of_two, rotated_heads


def rotary_embedding(
    index: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates the first rotary_dim elements of every head by the angles of its token, in place.

    Element i of the first half pairs with element i of the second half.

    Args:
        index: [T], int32 or int64: each token's row of `cos_sin`.
        query: [T, num_heads, head_size]; the last dimension is contiguous, the others may be strided. Overwritten.
        key: [T, num_kv_heads, head_size], likewise.
        cos_sin: [rows, rotary_dim], float32: cosines of the rotary_dim / 2 angles, then their sines.

    Returns:
        `query` and `key`; copies of those whose last dimension is not contiguous.
    """
    query, key = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key))
    num_tokens, num_heads, num_kv_heads = index.shape[0], query.shape[1], key.shape[1]
    half = cos_sin.shape[1] // 2
    if num_tokens == 0 or half == 0:
        return query, key
    pad = power_of_two(half)
    heads = rotated_heads(max(num_heads, num_kv_heads), pad)
    num_tiles = -(-num_heads // heads) + -(-num_kv_heads // heads)
    kernels.rotary_embedding[(num_tokens, num_tiles)](
        index, query, key, cos_sin,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), cos_sin.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=half,
        PAD=pad,
        BLOCK_H=heads,
        num_warps=4,
    )  # fmt: skip
    return query, key

"""Norm and rotary embedding of queries and keys, and the write of keys and values to a paged cache, in one launch."""

from __future__ import annotations

import torch

from mvllm_triton.float8 import BIAS, LARGEST
from mvllm_triton.kernels import rotary_embedding_and_cache as kernels
from mvllm_triton.tiles import power_of_two, rotated_heads


def rotary_embedding_and_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    index: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    interleaved: bool = False,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    float8: torch.dtype = torch.float8_e4m3fn,
) -> torch.Tensor:
    """Norms the heads of queries and keys, rotates them, and stores keys and values in their slots.

    The results are those of `rms_norm`, `rotary_embedding` and `reshape_and_cache` in this order, rounded as often.

    Args:
        query: [T, num_heads, head_size]; the last dimension is contiguous, the others may be strided. Overwritten.
        key: [T, num_kv_heads, head_size], likewise, unchanged.
        value: [T, num_kv_heads, value_size], likewise, unchanged.
        index: [T], int32 or int64: each token's row of `cos_sin`.
        cos_sin: [rows, rotary_dim], float32: cosines of the rotary_dim / 2 angles, then their sines.
        k_cache, v_cache, slot_mapping, float8: Like those of `reshape_and_cache`.
        interleaved: Adjacent elements are a pair. The results have the first elements of all pairs, then the second.
        q_weight, k_weight: [head_size]: weights of the norms; None for neither.
        eps: Added to the mean square.
        k_scale, v_scale: [num_blocks, block_size, num_kv_heads], float32: where an 8-bit cache's scales are stored.

    Returns:
        The rotated queries: `query`, or with `interleaved` a new tensor.

    Raises:
        ValueError: An 8-bit cache has no scales, or there is one norm without the other.
    """
    num_tokens, num_heads, size = query.shape
    num_kv_heads, value_size, half = key.shape[1], value.shape[2], cos_sin.shape[1] // 2
    format_ = float8 if k_cache.dtype == torch.uint8 else k_cache.dtype
    if (k_scale is not None and v_scale is not None) != (format_ in LARGEST):
        raise ValueError(f"A cache of {format_} and scales do not belong together: only 8-bit caches have scales.")
    if (q_weight is None) != (k_weight is None):
        raise ValueError("Give the weights of both norms, or none.")
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if interleaved else query
    if num_tokens == 0:
        return out
    if format_ in BIAS:  # the kernel encodes float8
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    scaled = k_scale is not None and v_scale is not None
    k_scales, v_scales = (k_scale, v_scale) if scaled else (cos_sin, cos_sin)  # unused pointers
    assert k_scales is not None and v_scales is not None
    half_pad, rest_pad = power_of_two(max(half, 1)), power_of_two(max(size - 2 * half, 1))
    value_pad = power_of_two(value_size)
    heads = rotated_heads(max(num_heads, num_kv_heads), max(half_pad, rest_pad, value_pad // 2))
    kernels.rotary_embedding_and_cache[(num_tokens, -(-num_heads // heads) + -(-num_kv_heads // heads))](
        out, query, key, value, k_cache, v_cache, k_scales, v_scales, index, slot_mapping, cos_sin,
        cos_sin if q_weight is None else q_weight, cos_sin if k_weight is None else k_weight, eps,
        out.stride(0), out.stride(1), query.stride(0), query.stride(1), key.stride(0), key.stride(1),
        value.stride(0), value.stride(1), cos_sin.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3],
        *(k_scales.stride() if scaled else (0, 0, 0)), *(v_scales.stride() if scaled else (0, 0, 0)),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        SIZE=size,
        HALF=half,
        HALF_PAD=half_pad,
        REST_PAD=rest_pad,
        VALUE_SIZE=value_size,
        VALUE_PAD=value_pad,
        BLOCK_SIZE=k_cache.shape[1],
        BLOCK_H=heads,
        INTERLEAVED=interleaved,
        NORM=q_weight is not None,
        SCALED=scaled,
        FP8=BIAS.get(format_, 0),
        LARGEST=LARGEST.get(format_, 0.0),
        num_warps=4,
    )  # fmt: skip
    return out

"""Writes a step's keys and values to a paged cache."""

from __future__ import annotations

import torch

from mvllm_triton.attention import Scale, scale_kind
from mvllm_triton.float8 import BIAS, LARGEST
from mvllm_triton.kernels import reshape_and_cache as kernels
from mvllm_triton.tiles import power_of_two, write_heads


def reshape_and_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: Scale = None,
    v_scale: Scale = None,
    float8: torch.dtype = torch.float8_e4m3fn,
) -> None:
    """Stores each token's key and value in its slot.

    An 8-bit cache stores keys and values divided by their scales. Scales in tensors [num_blocks, block_size, kv_heads]
    are computed and stored here: the largest magnitude of a head becomes the largest number of the dtype. Other scales
    are used as given, and numbers out of range are clamped.

    Args:
        k: [T, kv_heads, head_size], a float dtype; the last dimension is contiguous.
        v: [T, kv_heads, value_size], likewise.
        k_cache, v_cache: Like those of `paged_attention`.
        slot_mapping: int32 [T]: block * block_size + offset within the block; -1 stores nothing.
        k_scale, v_scale: Like those of `paged_attention`; None for float caches.
        float8: Format of codes in uint8.

    Raises:
        ValueError: Dtypes or scales don't fit together.
    """
    _launch(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, v.shape[2], float8)


def reshape_and_cache_mla(
    latents: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    kv_scale: Scale = None,
    float8: torch.dtype = torch.float8_e4m3fn,
) -> None:
    """Stores each token's latent and rotary part in its slot of the cache that `mla_attention` reads.

    Args:
        latents: [T, kv_heads, head_size], a float dtype; the last dimension is contiguous.
        cache: [num_blocks, block_size, kv_heads, head_size].

    The other arguments are those of `reshape_and_cache`.

    Raises:
        ValueError: Dtypes or scales don't fit together.
    """
    _launch(latents, latents, cache, cache, slot_mapping, kv_scale, kv_scale, 0, float8)


def _launch(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: Scale,
    v_scale: Scale,
    value_size: int,
    float8: torch.dtype,
) -> None:
    num_tokens, num_heads, key_size = k.shape
    kind, k_factor, v_factor = scale_kind(k_scale, v_scale)
    format_ = float8 if k_cache.dtype == torch.uint8 else k_cache.dtype
    if k_cache.dtype != v_cache.dtype:
        raise ValueError(
            f"Keys are stored as {k_cache.dtype} and values as {v_cache.dtype}; both must be of one dtype."
        )
    if kind and format_ not in LARGEST:
        raise ValueError(f"Scales belong to a cache of 8 bits; this one is of {k_cache.dtype}.")
    for name, x in (("keys", k), ("values", v), ("key cache", k_cache), ("value cache", v_cache)):
        if x.numel() and x.stride(-1) != 1:
            raise ValueError(f"The last dimension of {name} must be contiguous; its strides are {x.stride()}.")
    if num_tokens == 0:
        return
    if format_ in BIAS:  # the kernel encodes float8
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    k_scales = k_scale if isinstance(k_scale, torch.Tensor) else slot_mapping  # an unused pointer
    v_scales = v_scale if isinstance(v_scale, torch.Tensor) else slot_mapping
    k_scale_strides = k_scales.stride() if kind == 2 else (0, 0, 0)
    v_scale_strides = v_scales.stride() if kind == 2 else (0, 0, 0)
    key_pad, value_pad = power_of_two(key_size), power_of_two(max(value_size, 1))
    heads = write_heads(num_heads, max(key_pad, value_pad))
    kernels.reshape_and_cache[(num_tokens, -(-num_heads // heads))](
        k, v, k_cache, v_cache, k_scales, v_scales, slot_mapping, k_factor, v_factor,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3],
        *k_scale_strides, *v_scale_strides,
        NUM_HEADS=num_heads,
        KEY_SIZE=key_size,
        KEY_PAD=key_pad,
        VALUE_SIZE=value_size,
        VALUE_PAD=value_pad,
        BLOCK_SIZE=k_cache.shape[1],
        BLOCK_H=heads,
        SCALES=kind,
        FP8=BIAS.get(format_, 0),
        LARGEST=LARGEST.get(format_, 0.0),
        num_warps=4,
    )  # fmt: skip

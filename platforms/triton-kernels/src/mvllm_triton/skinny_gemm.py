"""Products of few rows with 16-bit weights: decode steps, which read every weight once."""

from __future__ import annotations

import torch

from mvllm_triton.device import processors, shared_memory
from mvllm_triton.kernels import skinny_gemm as kernels
from mvllm_triton.tiles import MAX_SKINNY_GEMM_ROWS, SkinnyGemmTiles, skinny_gemm_silu_and_mul_tiles, skinny_gemm_tiles

DTYPES = (torch.bfloat16, torch.float16)

_LEAST_COLUMNS = 4
"""Minimum `columns` of tiles of a product that is split."""

_counters: dict[tuple[torch.device, int, int], torch.Tensor] = {}
"""Counters of finished programs of a weight's tiles, zeros between launches, by the weight's device, address and rows.

They are never replaced, because captured graphs contain their addresses.
"""


def is_supported(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `skinny_gemm` multiplies these: few rows, 16-bit elements, rows of the weight aligned to 16 bytes."""
    in_features = weight.shape[-1]
    return (
        x.dtype in DTYPES
        and weight.dtype == x.dtype
        and 0 < x.numel() <= MAX_SKINNY_GEMM_ROWS * in_features
        and in_features % 16 == 0
        and weight.stride(1) == 1
        and weight.stride(0) % 16 == 0
    )


def skinny_gemm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, tiles: SkinnyGemmTiles | None = None
) -> torch.Tensor:
    """x · weightᵀ + bias, accumulated in float32 and rounded once.

    One launch. Launches with the same weight must not overlap, because they share counters. Equal arguments give equal
    results, bit for bit.

    Args:
        x: [..., in_features], at most MAX_SKINNY_GEMM_ROWS rows, bfloat16 or float16; see `is_supported`.
        weight: [out_features, in_features], x's dtype; its last dimension is contiguous.
        bias: [out_features] or None.
        tiles: None for those of `skinny_gemm_tiles`.

    Returns:
        [..., out_features], x's dtype.
    """
    out_features, in_features = weight.shape
    rows = x.reshape(-1, in_features)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    num_rows = rows.shape[0]
    if tiles is None:
        limits = processors(x.device), shared_memory(x.device)
        tiles = skinny_gemm_tiles(num_rows, out_features, in_features, *limits)
    num_tiles, iterations = -(-out_features // tiles.columns), -(-in_features // tiles.inner)
    counters = _counters_of(weight) if tiles.parts > 1 else None
    per_part = -(-iterations // tiles.parts) if counters is not None else iterations
    parts = -(-iterations // per_part)
    out = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    sums = (
        torch.empty(num_tiles * parts * tiles.columns * tiles.rows, dtype=torch.float32, device=x.device)
        if parts > 1
        else weight  # an unused pointer
    )
    tensors = (out, rows, weight, weight if bias is None else bias, sums, weight if counters is None else counters)
    constants = {
        "BIAS": bias is not None,
        "SPLIT": parts > 1,
        "EVEN_N": out_features % tiles.columns == 0,
        "EVEN_K": in_features % tiles.inner == 0,
        "BLOCK_N": tiles.columns,
        "BLOCK_K": tiles.inner,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
    sizes = (out_features, in_features, parts, per_part * tiles.inner)
    if tiles.rows == 1:
        kernels.gemv[(num_tiles, parts)](*tensors, *sizes, weight.stride(0), STAGES=tiles.num_stages, **constants)
    else:
        kernels.skinny_gemm[(num_tiles, parts)](
            *tensors, num_rows, *sizes, rows.stride(0), weight.stride(0), BLOCK_M=tiles.rows, **constants
        )
    return out.view(*x.shape[:-1], out_features)


def skinny_gemm_silu_and_mul(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, tiles: SkinnyGemmTiles | None = None
) -> torch.Tensor:
    """silu of the first half of x · weightᵀ + bias, times the second half, in one launch.

    Rounded like the separate operations: the product, the activation, and the result.

    Args:
        x: [..., in_features], at most MAX_SKINNY_GEMM_ROWS rows, bfloat16 or float16; see `is_supported`.
        weight: [2 * size, in_features], x's dtype, gate rows first; its last dimension is contiguous.
        bias: [2 * size] or None.
        tiles: None for those of `skinny_gemm_silu_and_mul_tiles`. Columns are not split.

    Returns:
        [..., size], x's dtype.
    """
    size, in_features = weight.shape[0] // 2, weight.shape[1]
    rows = x.reshape(-1, in_features)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    num_rows = rows.shape[0]
    tiles = tiles or skinny_gemm_silu_and_mul_tiles(num_rows, in_features, shared_memory(x.device))
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    tensors = (out, rows, weight, weight if bias is None else bias)
    constants = {
        "BIAS": bias is not None,
        "EVEN_N": size % tiles.columns == 0,
        "EVEN_K": in_features % tiles.inner == 0,
        "BLOCK_N": tiles.columns,
        "BLOCK_K": tiles.inner,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
    grid = (-(-size // tiles.columns),)
    if tiles.rows == 1:
        kernels.gemv_silu_and_mul[grid](
            *tensors, size, in_features, weight.stride(0), STAGES=tiles.num_stages, **constants
        )
    else:
        kernels.skinny_gemm_silu_and_mul[grid](
            *tensors, num_rows, size, in_features, rows.stride(0), weight.stride(0), BLOCK_M=tiles.rows, **constants
        )
    return out.view(*x.shape[:-1], size)


def _counters_of(weight: torch.Tensor) -> torch.Tensor | None:
    """Zeros, one for each tile; None if they do not exist and cannot be created, because a graph is captured.

    Zeros that are created in a capture exist only when that graph is replayed.
    """
    key = weight.device, weight.data_ptr(), weight.shape[0]
    counters = _counters.get(key)
    if counters is None and not _is_capturing(weight.device):
        counters = torch.zeros(-(-weight.shape[0] // _LEAST_COLUMNS), dtype=torch.int32, device=weight.device)
        _counters[key] = counters
    return counters


def _is_capturing(device: torch.device) -> bool:
    if device.type in ("cpu", "meta"):
        return False
    asked = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return asked is not None and bool(asked())

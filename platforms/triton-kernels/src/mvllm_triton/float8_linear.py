"""Linear layers with float8 weights, per tensor, per row or by block; activations in float8 (W8A8) or unquantized."""

from __future__ import annotations

import math

import torch

from mvllm_triton.device import processors
from mvllm_triton.dtypes import TRITON_DTYPES
from mvllm_triton.float8 import BIAS, LARGEST
from mvllm_triton.kernels import float8_linear as kernels
from mvllm_triton.split_k import partial_results, splitk_reduce
from mvllm_triton.tiles import float8_tiles, inner_splits, most_splits, power_of_two


def scaled_fp8_quant(
    x: torch.Tensor,
    group_size: int | None = None,
    float8: torch.dtype = torch.float8_e4m3fn,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds rows to float8 with one scale for each group of columns.

    Args:
        x: [rows, size], a float dtype; the last dimension is contiguous.
        group_size: Columns that share a scale, a power of two; None for whole rows.
        float8: The format.
        scale: float32, one element: the scale of all groups; numbers out of range are clamped. None computes the scale
            of each group, which maps its largest magnitude to the format's largest number.

    Returns:
        [rows, size] of `float8`, and float32 [rows, groups]: value = code * scale. The scale of a group with a NaN is
        NaN.
    """
    num_rows, size = x.shape
    group = size if group_size is None else group_size
    num_groups = max(1, -(-size // group))
    codes = torch.empty((num_rows, size), dtype=torch.uint8, device=x.device)
    scales = torch.empty((num_rows, num_groups), dtype=torch.float32, device=x.device)
    if codes.numel():
        block = group if num_groups > 1 else min(2048, power_of_two(size))
        kernels.scaled_fp8_quant[(num_rows, num_groups)](
            codes, scales, x, scales if scale is None else scale, x.stride(0),
            SIZE=size,
            GROUP_SIZE=group,
            BLOCK=block,
            FP8=BIAS[float8],
            LARGEST=LARGEST[float8],
            GIVEN=scale is not None,
            num_warps=max(1, min(4, block // 256)),
        )  # fmt: skip
    return codes.view(float8), scales


def float8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    block: tuple[int, int] | None = None,
    x_scale: torch.Tensor | None = None,
    native: bool = True,
    rounded: bool = True,
) -> torch.Tensor:
    """x · weightᵀ + bias with a float8 weight. x is rounded to float8 as well, except with `rounded=False`.

    Args:
        x: [..., in_features], bfloat16, float16 or float32. Rounded here, with one scale per row, or per group with
            `block`.
        weight: [out_features, in_features], a float8 dtype; the last dimension is contiguous.
        weight_scale: float32: one element for all, [out_features] or [out_features, 1] for each row, or with `block`
            [ceil(out_features / rows), ceil(in_features / columns)].
        bias: [out_features] or None.
        block: Rows and columns of the weight that share a scale; columns are a power of two, at least 32.
        x_scale: float32, one element: the calibrated scale by which `x` is divided. None computes the scales.
        native: Whether the device multiplies this format; otherwise codes are widened before the product.
        rounded: Whether `x` is rounded; otherwise the weight is widened and multiplied with the unquantized `x`.

    Returns:
        [..., out_features], x's dtype.

    Raises:
        ValueError: The dtype is no float8, or scales don't fit.
    """
    out_features, in_features = weight.shape
    if weight.dtype not in BIAS:
        raise ValueError(f"The weight is of {weight.dtype}; float8_linear takes {', '.join(str(d) for d in BIAS)}.")
    if block is not None and (block[1] < 32 or block[1] & (block[1] - 1)):
        raise ValueError(f"Blocks have columns of a power of two from 32 on, not {block[1]}.")
    rows = x.reshape(-1, in_features)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    num_rows = rows.shape[0]
    out = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out.view(*x.shape[:-1], out_features)
    scale_strides, x_scale_strides = _scale_strides(weight, weight_scale, block), (0, 0)
    row_scales = weight_scale  # an unused pointer
    if rounded:
        by_group = block is not None and x_scale is None
        rows, row_scales = scaled_fp8_quant(rows, block[1] if by_group and block else None, weight.dtype, x_scale)
        x_scale_strides = (row_scales.stride(0), row_scales.stride(1) if row_scales.shape[1] > 1 else 0)
    group_rows, group = (1, in_features) if block is None else block
    tiles = float8_tiles(num_rows, out_features, in_features, group)
    fp8 = 0
    if not (native and rounded):
        rows = rows.view(torch.uint8) if rounded else rows
        weight, fp8 = weight.view(torch.uint8), BIAS[weight.dtype]
    grid = -(-num_rows // tiles.rows), -(-out_features // tiles.columns)
    most = most_splits(tiles.rows, out_features, weight.nbytes)
    splits = inner_splits(math.prod(grid), in_features, tiles.inner, processors(x.device), most=most)
    parts = partial_results(out, splits.num)
    kernels.fp8_gemm[(*grid, splits.num)](
        parts, rows, row_scales, weight, weight_scale, weight_scale if bias is None else bias, num_rows,
        rows.stride(0), *x_scale_strides, weight.stride(0), *scale_strides,
        IN=in_features,
        OUT=out_features,
        GROUP_SIZE=group,
        GROUP_ROWS=group_rows,
        BIAS=bias is not None,
        X_SCALED=rounded,
        FP8=fp8,
        DTYPE=TRITON_DTYPES[x.dtype],
        SPLITS=splits.num,
        CHUNK=splits.size,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.columns,
        BLOCK_K=tiles.inner,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )  # fmt: skip
    splitk_reduce(out, parts)
    return out.view(*x.shape[:-1], out_features)


def _scale_strides(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None) -> tuple[int, int]:
    """Strides of the scales: between rows (or blocks of rows), and between groups of columns."""
    out_features, in_features = weight.shape
    if block is not None:
        expected = (-(-out_features // block[0]), -(-in_features // block[1]))
        if tuple(scale.shape) != expected:
            raise ValueError(f"Blocks {block} of a weight {list(weight.shape)} have scales {list(expected)}, "
                             f"not {list(scale.shape)}.")  # fmt: skip
        return scale.stride(0), scale.stride(1)
    if scale.numel() == 1:
        return 0, 0
    if scale.numel() != out_features or scale.shape[0] != out_features:
        raise ValueError(f"A weight {list(weight.shape)} has one scale or {out_features}, not {list(scale.shape)}.")
    return scale.stride(0), 0

"""Converts core's 8-bit float weights to the layout and format that a device multiplies with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from mvllm_triton import scaled_mm
from mvllm_triton.float8_linear import float8_linear, scaled_fp8_quant

_CODES_AT_ONCE = 1 << 26
"""Codes of a weight that are searched for NaN together."""


class Float8Weight(Protocol):
    """E4M3 codes with scales. Core's `Float8Weight` implements it."""

    @property
    def codes(self) -> torch.Tensor:
        """[out_features, in_features], uint8."""

    @property
    def scales(self) -> torch.Tensor:
        """[blocks of rows, blocks of columns], float32."""

    @property
    def block_rows(self) -> int:
        """Rows that share a scale."""

    @property
    def block_columns(self) -> int:
        """Columns that share a scale."""

    @property
    def inputs(self) -> str:
        """`floats`, `dynamic` or `static`."""

    @property
    def input_scale(self) -> torch.Tensor | None:
        """[1], float32, if inputs are static."""


@dataclass(frozen=True)
class PackedFloat8:
    """A weight in the layout of `float8_product`. Made by `pack`.

    Attributes:
        weight: [out_features, in_features], a float8 dtype.
        scale: float32, the `weight_scale` of `float8_linear`.
        block: Rows and columns that share a scale; None for a scale per row or one for all.
        input_scale: [1], float32: the static scale of inputs, if there is one.
        rounded: Whether inputs are rounded.
        native: Whether the device multiplies this format.
        library_scale: float32: `scale` as torch's library takes it (scaled_mm.py); None with blocks.
        library: The combinations that the library computes; empty if our kernel multiplies.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    block: tuple[int, int] | None
    input_scale: torch.Tensor | None
    rounded: bool
    native: bool
    library_scale: torch.Tensor | None = None
    library: frozenset[scaled_mm.Combination] = frozenset()


def refusals(in_features: int, block_columns: int) -> list[str]:
    """Reasons why a weight cannot be packed; empty if it can."""
    if block_columns < in_features and (block_columns < 32 or block_columns & (block_columns - 1)):
        return [f"blocks have columns of a power of two from 32 on, or all {in_features}, not {block_columns}"]
    return []


def pack(weight: Float8Weight, float8: torch.dtype = torch.float8_e4m3fn, *, native: bool = True) -> PackedFloat8:
    """The weight in a format of the device.

    Args:
        weight: E4M3 codes.
        float8: `float8_e4m3fn`, the format of these codes, or `float8_e4m3fnuz`, in which a code has half the value, so
            scales are doubled.
        native: Whether the device multiplies this format.

    Raises:
        ValueError: The weight cannot be packed; see `refusals`.
    """
    out_features, in_features = weight.codes.shape
    reasons = refusals(in_features, weight.block_columns)
    if reasons:
        raise ValueError(f"This weight cannot be packed: {'; '.join(reasons)}.")
    block = (weight.block_rows, weight.block_columns)
    codes, scales, input_scale = in_format(weight, float8)
    whole = weight.block_columns >= in_features
    if whole and scales.numel() > 1:
        scales = scales.repeat_interleave(weight.block_rows, 0)[:out_features]
    packed, scales = codes.contiguous().view(float8), scales.contiguous()
    rounded = weight.inputs != "floats"
    library_scale, library = None, frozenset[scaled_mm.Combination]()
    if whole and rounded and native:
        per_tensor = input_scale is not None and scales.numel() == 1
        library = scaled_mm.supported(packed, per_tensor=per_tensor)
        flat = scales.view(-1)
        library_scale = flat if per_tensor else flat.expand(out_features).contiguous().view(1, -1)
    block_sizes = None if whole else block
    return PackedFloat8(packed, scales, block_sizes, input_scale, rounded, native, library_scale, library)


def in_format(weight: Float8Weight, float8: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes, scales and the static scale of inputs for the format `float8`, as for `pack`."""
    codes, input_scale = weight.codes, weight.input_scale if weight.inputs == "static" else None
    scales = _with_nan(codes, weight.scales.float(), (weight.block_rows, weight.block_columns))
    if float8 == torch.float8_e4m3fnuz:
        codes = codes.masked_fill(codes == 0x80, 0)  # minus zero, whose code is NaN in e4m3fnuz
        scales, input_scale = scales * 2, None if input_scale is None else input_scale * 2
    return codes, scales, input_scale


def float8_product(x: torch.Tensor, weight: PackedFloat8, bias: torch.Tensor | None) -> torch.Tensor:
    """x · weightᵀ + bias with a weight of 8-bit floats with scales.

    Args:
        x: [..., in_features], compute dtype.
        weight: The packed weight.
        bias: [out_features] or None.

    Returns:
        [..., out_features], compute dtype.
    """
    scale = weight.library_scale
    if scale is not None and x.numel() and (x.dtype, bias is not None) in weight.library:
        rows = x.reshape(-1, x.shape[-1])
        codes, row_scales = scaled_fp8_quant(
            rows if rows.stride(1) == 1 else rows.contiguous(), None, weight.weight.dtype, weight.input_scale
        )
        if scale.dim() == 1 and weight.input_scale is not None:
            row_scales = weight.input_scale
        product = scaled_mm.multiply(codes, row_scales, weight.weight, scale, bias, x.dtype)
        return product.view(*x.shape[:-1], -1)
    return float8_linear(
        x,
        weight.weight,
        weight.scale,
        bias,
        block=weight.block,
        x_scale=weight.input_scale,
        native=weight.native and x.element_size() == 2,  # devices sum float8 products with fewer bits than float32
        rounded=weight.rounded,
    )


def _with_nan(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The scales, with NaN for each block that has a NaN code, because not every conversion of codes keeps NaN."""
    num_columns, (block_rows, block_columns) = codes.shape[1], block
    step = block_rows * max(1, _CODES_AT_ONCE // (block_rows * num_columns))  # rows; bounds the memory of the masks
    bad = []
    for rows in codes.split(step):
        is_nan = (rows & 0x7F) == 0x7F
        padded = torch.nn.functional.pad(is_nan, (0, -num_columns % block_columns, 0, -len(rows) % block_rows))
        bad.append(padded.view(-1, block_rows, padded.shape[1] // block_columns, block_columns).any(3).any(1))
    return scales.masked_fill(torch.cat(bad), torch.nan)

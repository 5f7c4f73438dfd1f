"""Converts core's 8-bit float weights to the layout and format that a device multiplies with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from mvllm_triton.float8_linear import float8_linear


class Float8Weight(Protocol):
    """Codes of E4M3 with scales, as core's `Float8Weight` has it."""

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
        """[1], float32, where inputs are static."""


@dataclass(frozen=True)
class PackedFloat8:
    """A weight as `float8_product` takes it. Made by `pack`.

    Attributes:
        weight: [out_features, in_features], a float8 dtype.
        scale: float32, as `float8_linear` has it for `block`.
        block: Rows and columns that share a scale; None where a row has one, or all have.
        input_scale: [1], float32, where inputs are rounded with that one.
        rounded: Whether inputs are rounded.
        native: Whether the device multiplies this format.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    block: tuple[int, int] | None
    input_scale: torch.Tensor | None
    rounded: bool
    native: bool


def refusals(in_features: int, block_columns: int) -> list[str]:
    """Reasons why a weight cannot be packed; empty where it can."""
    if block_columns < in_features and (block_columns < 32 or block_columns & (block_columns - 1)):
        return [f"blocks have columns of a power of two from 32 on, or all {in_features}, not {block_columns}"]
    return []


def pack(weight: Float8Weight, float8: torch.dtype = torch.float8_e4m3fn, *, native: bool = True) -> PackedFloat8:
    """The weight in a format of the device.

    Args:
        weight: Codes of E4M3.
        float8: `float8_e4m3fn`, whose codes these are, or `float8_e4m3fnuz`: there a code says half as much, so that
            scales are doubled.
        native: Whether the device multiplies this format.

    Raises:
        ValueError: It cannot be packed; see `refusals`.
    """
    codes, scales, input_scale = weight.codes, weight.scales.float(), weight.input_scale
    out_features, in_features = codes.shape
    reasons = refusals(in_features, weight.block_columns)
    if reasons:
        raise ValueError(f"This weight cannot be packed: {'; '.join(reasons)}.")
    block = (weight.block_rows, weight.block_columns)
    scales = _with_nan(codes, scales, block)
    if float8 == torch.float8_e4m3fnuz:
        codes = codes.masked_fill(codes == 0x80, 0)  # minus zero, which is no number there
        scales, input_scale = scales * 2, None if input_scale is None else input_scale * 2
    whole = weight.block_columns >= in_features
    if whole and scales.numel() > 1:
        scales = scales.repeat_interleave(weight.block_rows, 0)[:out_features]
    return PackedFloat8(
        codes.contiguous().view(float8),
        scales.contiguous(),
        None if whole else block,
        input_scale if weight.inputs == "static" else None,
        weight.inputs != "floats",
        native,
    )


def float8_product(x: torch.Tensor, weight: PackedFloat8, bias: torch.Tensor | None) -> torch.Tensor:
    """x · weightᵀ + bias, where the weight is 8-bit floats with scales.

    Args:
        x: [..., in_features], compute dtype.
        weight: What `pack` made.
        bias: [out_features] or None.

    Returns:
        [..., out_features], compute dtype.
    """
    return float8_linear(
        x,
        weight.weight,
        weight.scale,
        bias,
        block=weight.block,
        x_scale=weight.input_scale,
        native=weight.native and x.element_size() == 2,  # devices add such products with fewer bits than float32 has
        rounded=weight.rounded,
    )


def _with_nan(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Scales that are NaN where a code of their block is: not every way to read codes knows one."""
    bad = torch.zeros_like(scales, dtype=torch.bool)
    for index, rows in enumerate(codes.split(block[0])):
        in_columns = ((rows & 0x7F) == 0x7F).any(dim=0)
        padded = torch.nn.functional.pad(in_columns, (0, -codes.shape[1] % block[1]))
        bad[index] = padded.view(-1, block[1]).any(dim=1)
    return scales.masked_fill(bad, torch.nan)

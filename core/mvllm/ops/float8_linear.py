"""The operation `float8_linear`: matrix product with an FP8 (E4M3) weight and optionally rounded inputs.

A weight has one byte per element, with 4 significant bits, and a scale for each block of rows and columns. The
checkpoint determines the inputs: unchanged; rounded with scales computed for each row (*dynamic*); or rounded with one
scale from the quantization of the model (*static*).

No layer runs the reference: without a provider, `linear` multiplies with the dequantized weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from mvllm.contract import Phase, phase
from mvllm.ops.schema import OpSchema

Float8Inputs = Literal["floats", "dynamic", "static"]
"""Rounding of the inputs of a product."""

LARGEST = 448.0
"""The largest number of E4M3."""


@phase(Phase.WORKER)
@dataclass(frozen=True)
class Float8Weight:
    """A matrix [out_features, in_features] of 8-bit floats with scales.

    Attributes:
        codes: [out_features, in_features], uint8: a sign, 4 bits of exponent with the bias 7, 3 bits of mantissa; no
            infinities; 0x7F and 0xFF are NaN (torch's `float8_e4m3fn`). uint8, since a device may lack that dtype.
        scales: [ceil(out_features / block_rows), ceil(in_features / block_columns)], float32; w = number · scale.
        block_rows, block_columns: Size of a block, whose elements share a scale.
        inputs: Rounding of the inputs.
        input_scale: [1], float32, for `static` inputs, else None.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    block_rows: int
    block_columns: int
    inputs: Float8Inputs = "floats"
    input_scale: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """(out_features, in_features)."""
        return self.codes.shape

    def dequantize(self) -> torch.Tensor:
        """number · scale, [out_features, in_features], float32."""
        out_features, in_features = self.codes.shape
        numbers = _numbers().to(self.codes.device)
        scales = self.scales.repeat_interleave(self.block_rows, 0)[:out_features]
        return numbers[self.codes.long()] * scales.repeat_interleave(self.block_columns, 1)[:, :in_features]


def float8_linear(x: torch.Tensor, weight: Float8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """x · weightᵀ + bias, where the weight is 8-bit floats with scales.

    `floats`: the dequantized weight times `x`, in float32, rounded once.

    `dynamic`: each row of `x` is split into groups of the weight's block_columns. Each group is rounded to 8-bit floats
    with the scale s = max |group| / 448, in float32; a group of zeros stays zeros. `static`: all of `x` is rounded to
    8-bit floats, clamped to ±448, with the scale `input_scale`. Rounding is to the nearest, halves to even. The result
    is the product with the dequantized weight in float32, plus the bias, rounded once.

    A device whose 8-bit float format has as many significant bits and another range rounds the inputs to that format:
    `s` is then max |group| divided by its largest number, and the clamp may be larger than 448.

    Args:
        x: [..., in_features], compute dtype.
        weight: The weight [out_features, in_features], or the result of the provider's `prepare`.
        bias: [out_features] or None, compute dtype.

    Returns:
        [..., out_features], compute dtype. A row's result does not depend on the other rows.
    """
    rows = x.reshape(-1, x.shape[-1]).float()
    if weight.inputs == "dynamic":
        runs = [_rounded_run(run) for run in rows.split(weight.block_columns, dim=1)]
        rows = torch.cat(runs, dim=1)
    elif weight.inputs == "static":
        assert weight.input_scale is not None, "static inputs have a scale"
        rows = _rounded(rows / weight.input_scale) * weight.input_scale
    product = rows @ weight.dequantize().T
    if bias is not None:
        product += bias.float()
    return product.to(x.dtype).view(*x.shape[:-1], -1)


def _rounded_run(run: torch.Tensor) -> torch.Tensor:
    scales = run.abs().amax(dim=1, keepdim=True) / LARGEST
    return _rounded(run / scales.where(scales > 0, 1.0)) * scales


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """The nearest numbers of E4M3, clamped to the largest, computed with operations that every device has."""
    magnitude = x.abs()
    step = torch.full_like(x, 2.0**-9)
    for exponent in range(-5, 9):
        step = torch.where(magnitude >= 2.0**exponent, 2.0 ** (exponent - 3), step)
    return (torch.round(x / step) * step).clamp(-LARGEST, LARGEST)


def _numbers() -> torch.Tensor:
    """The number of each code, float32 [256]."""
    code = torch.arange(256)
    exponent, mantissa = (code >> 3) & 15, (code & 7).float()
    number = torch.where(
        exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * torch.exp2((exponent - 10).clamp(min=-9).float())
    )
    number[(code & 127) == 127] = torch.nan
    return torch.where(code >= 128, -number, number)


FLOAT8_LINEAR = OpSchema(
    float8_linear,
    facts={
        "in_features": "columns of the weight on this rank",
        "out_features": "rows of the weight on this rank",
        "bias": "whether a bias is added",
        "block_rows": "rows that share a scale; out_features if all do",
        "block_columns": "columns that share a scale; in_features if a row has one scale",
        "inputs": "rounding of the inputs: 'floats' for none, 'dynamic' or 'static' to 8-bit floats",
    },
    replaces_others=True,
)

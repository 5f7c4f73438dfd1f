"""The operations `quantized_linear` and `quantized_linear_silu_and_mul`: matrix product with an integer weight.

A weight of 8 or 4 bits has integers and, for each row and each group of `group_size` columns, a scale and optionally a
zero point: w = (value - zero_point) · scale. *Weight-only* quantization keeps the activations; with *int8 activations*
each token's row is rounded to int8 as well, and the sums are integers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mvllm.contract import Phase, phase
from mvllm.ops.activation import silu_and_mul
from mvllm.ops.schema import OpSchema

_EXACT_COLUMNS = 1024
"""The sum of so many products of int8 values is below 2**24, so it is exact in float32 in any order."""


@phase(Phase.WORKER)
@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix [out_features, in_features] of small integers.

    Attributes:
        values: [out_features, in_features], int8; with 4 bits from -8 to 7.
        scales: [out_features, groups], float32; groups = ceil(in_features / group_size).
        zero_points: [out_features, groups], int8, in the same units as the values; None if all are zero (symmetric).
        group_size: Columns that share a scale; in_features if a row has one scale.
        bits: 8 or 4.
        int8_activations: The input is rounded to int8, a scale per row (token), before it is multiplied.
    """

    values: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None
    group_size: int
    bits: int
    int8_activations: bool = False

    @property
    def shape(self) -> torch.Size:
        """(out_features, in_features)."""
        return self.values.shape

    def dequantize(self) -> torch.Tensor:
        """(value - zero_point) · scale, [out_features, in_features], float32."""
        weight = torch.empty(self.values.shape, dtype=torch.float32, device=self.values.device)
        for group, columns in enumerate(self._columns()):
            values = self.values[:, columns].float()
            if self.zero_points is not None:
                values -= self.zero_points[:, group, None].float()
            weight[:, columns] = values * self.scales[:, group, None]
        return weight

    def _columns(self) -> list[slice]:
        """The columns of each group; the last may have fewer than the others."""
        in_features = self.values.shape[1]
        starts = range(0, in_features, self.group_size)
        return [slice(start, min(start + self.group_size, in_features)) for start in starts]


def quantized_linear(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x · weightᵀ + bias, where the weight is integers with scales.

    Weight-only: the dequantized weight in float32, times `x` in float32, rounded once.

    Int8 activations: each row of `x` becomes round(row / s), halves to even, clamped to ±127, with s = max |row| / 127
    in float32 (a row of zeros stays zeros); sums within a group are int32 and exact; the result is the sum over groups
    of sum · s · scale in float32, plus the bias, rounded once.

    Args:
        x: [..., in_features], compute dtype.
        weight: The weight [out_features, in_features], or the result of the provider's `prepare`.
        bias: [out_features] or None, compute dtype.

    Returns:
        [..., out_features], compute dtype.
    """
    rows = x.reshape(-1, x.shape[-1]).float()
    product = _int8_product(rows, weight) if weight.int8_activations else rows @ weight.dequantize().T
    if bias is not None:
        product += bias.float()
    return product.to(x.dtype).view(*x.shape[:-1], -1)


def _int8_product(rows: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    row_scales = rows.abs().amax(dim=-1, keepdim=True) / 127
    # A row of zeros has the scale zero: divided by one it stays zeros, and so does its product.
    quantized = torch.round(rows / row_scales.where(row_scales > 0, 1.0)).clamp(-127, 127)
    product = torch.zeros(rows.shape[0], weight.values.shape[0], dtype=torch.float32, device=rows.device)
    for group, columns in enumerate(weight._columns()):
        inputs, values = quantized[:, columns], weight.values[:, columns].float()
        sums = torch.zeros(product.shape, dtype=torch.int32, device=rows.device)
        for start in range(0, values.shape[1], _EXACT_COLUMNS):
            piece = slice(start, start + _EXACT_COLUMNS)
            sums += (inputs[:, piece] @ values[:, piece].T).to(torch.int32)
        if weight.zero_points is not None:
            totals = inputs.sum(dim=-1, keepdim=True).to(torch.int32)
            sums -= totals * weight.zero_points[:, group].to(torch.int32)
        product += sums.float() * weight.scales[:, group]
    return product * row_scales


def quantized_linear_silu_and_mul(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """silu of the first half of x · weightᵀ + bias, times the second half, where the weight is integers with scales.

    Replaces `quantized_linear` followed by `silu_and_mul` if there is a provider other than this reference.

    Args:
        x: [..., in_features], compute dtype.
        weight: The weight [2 · size, in_features], gate rows first, or the result of the provider's `prepare`.
        bias: [2 · size] or None, compute dtype.

    Returns:
        [..., size], compute dtype; the product may be rounded to it before the activation, or not.
    """
    return silu_and_mul(quantized_linear(x, weight, bias))


_FACTS = {
    "bias": "whether a bias is added",
    "bits": "8 or 4",
    "group_size": "columns that share a scale; in_features if a row has one scale",
    "symmetric": "whether the weight has no zero points",
    "int8_activations": "whether the input is rounded to int8, row by row",
}

QUANTIZED_LINEAR = OpSchema(
    quantized_linear,
    facts={
        "in_features": "columns of the weight on this rank",
        "out_features": "rows of the weight on this rank",
        **_FACTS,
    },
)

QUANTIZED_LINEAR_SILU_AND_MUL = OpSchema(
    quantized_linear_silu_and_mul,
    facts={
        "in_features": "columns of the weight on this rank",
        "size": "half of the weight's rows on this rank",
        **_FACTS,
    },
    replaces_others=True,
)

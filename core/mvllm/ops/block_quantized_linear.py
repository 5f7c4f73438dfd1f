"""The operations `block_quantized_linear` and `block_quantized_linear_silu_and_mul`: products with blocks of a file.

The weight keeps the blocks of integers with scales that a checkpoint stores (block_formats.py), without conversion.
Ranges of its rows may have different formats: a fused projection has a part for each matrix it consists of.

No layer runs the references: without a provider, `linear` multiplies with the dequantized weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mvllm.contract import Phase, phase
from mvllm.ops.activation import silu_and_mul
from mvllm.ops.block_formats import dequantize_rows
from mvllm.ops.schema import OpSchema

INPUT_BLOCK = 32
"""Columns of an input that share a scale, where it is rounded to int8."""


@phase(Phase.WORKER)
@dataclass(frozen=True)
class BlockQuantizedPart:
    """Neighbouring rows of a matrix, in one format.

    Attributes:
        format: q4_0, q4_1, q5_0, q5_1, q8_0, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs or mxfp4 (block_formats.py).
        data: [rows, row_bytes], uint8: the blocks of each row, as in the file.
    """

    format: str
    data: torch.Tensor


@phase(Phase.WORKER)
@dataclass(frozen=True)
class BlockQuantizedWeight:
    """A matrix [out_features, in_features] of quantized blocks.

    Attributes:
        parts: Its rows from the first to the last, at least one part.
        in_features: Columns, a multiple of the values in a block of each part.
        int8_activations: Inputs in bfloat16 and float16 are rounded to int8; float32 is not.
        dtype: Compute dtype, to which a provider's `lookup` rounds the rows of a tied head.
    """

    parts: tuple[BlockQuantizedPart, ...]
    in_features: int
    int8_activations: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> torch.Size:
        """(out_features, in_features)."""
        return torch.Size((sum(len(part.data) for part in self.parts), self.in_features))

    @property
    def formats(self) -> tuple[str, ...]:
        """Formats of the parts."""
        return tuple(part.format for part in self.parts)

    def dequantize(self) -> torch.Tensor:
        """[out_features, in_features], float32."""
        return torch.cat([dequantize_rows(part.data, part.format) for part in self.parts])


def block_quantized_linear(x: torch.Tensor, weight: BlockQuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x · weightᵀ + bias, where the weight is blocks of integers with scales.

    Weight-only, and wherever `x` is float32: the dequantized weight in float32, times `x` in float32, rounded once.

    Int8 activations: each run of 32 columns of a row of `x` becomes q · s with s = max |run| / 127 in float32 and
    q = round(run / s), halves to even, clamped to ±127; a run of zeros stays zeros. Sums of q times the integers of a
    block's group are exact. The result is the sum over groups in float32, plus the bias, rounded once.

    Args:
        x: [..., in_features], compute dtype.
        weight: The weight [out_features, in_features], or the result of the provider's `prepare`.
        bias: [out_features] or None, compute dtype.

    Returns:
        [..., out_features], compute dtype. A row's result does not depend on the other rows.
    """
    rows = x.reshape(-1, x.shape[-1]).float()
    if weight.int8_activations and x.dtype != torch.float32:
        rows = _rounded(rows)
    product = rows @ weight.dequantize().T
    if bias is not None:
        product += bias.float()
    return product.to(x.dtype).view(*x.shape[:-1], -1)


def _rounded(rows: torch.Tensor) -> torch.Tensor:
    runs = rows.view(rows.shape[0], -1, INPUT_BLOCK)
    scales = runs.abs().amax(dim=-1, keepdim=True) / 127
    # A run of zeros has the scale zero: divided by one it stays zeros.
    return (torch.round(runs / scales.where(scales != 0, 1.0)).clamp(-127, 127) * scales).view(rows.shape)


def block_quantized_linear_silu_and_mul(
    x: torch.Tensor, weight: BlockQuantizedWeight, bias: torch.Tensor | None
) -> torch.Tensor:
    """silu of the first half of x · weightᵀ + bias, times the second half, where the weight is blocks of integers.

    Replaces `block_quantized_linear` followed by `silu_and_mul` if there is a provider other than this reference.

    Args:
        x: [..., in_features], compute dtype.
        weight: The weight [2 · size, in_features], gate rows first, or the result of the provider's `prepare`.
        bias: [2 · size] or None, compute dtype.

    Returns:
        [..., size], compute dtype; the product may be rounded to it before the activation, or not.
    """
    return silu_and_mul(block_quantized_linear(x, weight, bias))


_FACTS = {
    "bias": "whether a bias is added",
    "formats": "tuple of the names of the parts' formats, from the first row on",
    "int8_activations": "whether inputs of 16 bits are rounded to int8, in runs of 32 columns",
}

BLOCK_QUANTIZED_LINEAR = OpSchema(
    block_quantized_linear,
    facts={
        "in_features": "columns of the weight on this rank",
        "out_features": "rows of the weight on this rank",
        **_FACTS,
    },
    replaces_others=True,
)

BLOCK_QUANTIZED_LINEAR_SILU_AND_MUL = OpSchema(
    block_quantized_linear_silu_and_mul,
    facts={
        "in_features": "columns of the weight on this rank",
        "size": "half of the weight's rows on this rank",
        **_FACTS,
    },
    replaces_others=True,
)

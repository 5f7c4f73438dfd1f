"""Experts' weights in the layout of the kernels (kernels/quantized_moe.py), packed one expert at a time.

Weights keep the bits of the checkpoint: MXFP4, 8-bit floats with scales, and integers of 4 and 8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from mvllm_triton import float8_weight, quantized_linear
from mvllm_triton.float8_weight import Float8Weight
from mvllm_triton.quantized_linear import IntegerWeight

MXFP4, INT4, INT8, FLOAT8 = range(4)
"""Kinds of weights, as in kernels/quantized_moe.py."""

MXFP4_GROUP, MXFP4_COLUMNS = 32, 128
"""Columns that share a scale, and columns whose scales are in one int32."""

_LARGEST_EXPONENT = 240
"""The kernel multiplies a scale with 2**14 before the number; weights of 2**113 have no use in a product."""


class BlockPart(Protocol):
    """Neighbouring rows of a `BlockWeight`. Core's `BlockQuantizedPart` implements it."""

    @property
    def format(self) -> str:
        """Name of the format."""

    @property
    def data(self) -> torch.Tensor:
        """[rows, row bytes], uint8."""


class BlockWeight(Protocol):
    """A matrix of quantized blocks, of the format mxfp4. Core's `BlockQuantizedWeight` implements it."""

    @property
    def parts(self) -> Sequence[BlockPart]:
        """Its rows from the first to the last."""

    @property
    def in_features(self) -> int:
        """Columns."""


@dataclass(frozen=True)
class PackedExperts:
    """One of the two matrices of all experts. Made by the functions below.

    Attributes:
        kind: MXFP4, INT4, INT8 or FLOAT8.
        data, scales, zero_points: As in kernels/quantized_moe.py; `zero_points` is None if all are zero.
        group_size: Columns that share a scale; `in_features` if all do.
        group_rows: Rows that share a scale.
        inner: Columns that are multiplied at once.
        in_features, out_features: Sizes of a matrix.
        rounded: Whether inputs are rounded to 8 bits.
        input_scale: [1], float32: the scale of rounded inputs; None computes scales.
        native: Whether the device multiplies the float8 format.
    """

    kind: int
    data: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None
    group_size: int
    group_rows: int
    inner: int
    in_features: int
    out_features: int
    rounded: bool = False
    input_scale: torch.Tensor | None = None
    native: bool = False

    @property
    def num_experts(self) -> int:
        """Number of experts."""
        return len(self.data)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = (self.data, self.scales, self.zero_points)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class Mxfp4Experts:
    """Packs experts of blocks of the format mxfp4.

    Args:
        first: The first expert's weight.
        num_experts: Number of experts.
    """

    def __init__(self, first: BlockWeight, num_experts: int) -> None:
        self._columns = columns = first.in_features
        self._rows = rows = sum(len(part.data) for part in first.parts)
        device = first.parts[0].data.device
        shape = num_experts, rows, (columns + -columns % 64) // 2
        self._data = torch.zeros(shape, dtype=torch.uint8, device=device)
        words = -(-columns // MXFP4_COLUMNS)
        self._scales = torch.empty((num_experts, words, rows), dtype=torch.int32, device=device)

    def put(self, expert: int, weight: BlockWeight) -> None:
        """Packs one expert."""
        blocks = torch.cat([part.data.view(len(part.data), -1, 17) for part in weight.parts])
        num_groups = blocks.shape[1]
        exponents = blocks[..., 0].clamp(max=_LARGEST_EXPONENT)
        exponents = torch.nn.functional.pad(exponents, (0, -num_groups % 4)).contiguous()
        self._scales[expert] = exponents.view(torch.int32).T
        # A block has values 0 to 15 in its lower halves and 16 to 31 in its upper halves.
        codes = torch.cat((blocks[..., 1:] & 0xF, blocks[..., 1:] >> 4), dim=2)
        low, high = torch.nn.functional.pad(codes, (0, 0, 0, num_groups % 2)).view(self._rows, -1, 2, 32).unbind(2)
        self._data[expert] = (low | (high << 4)).view(self._rows, -1)

    def packed(self) -> PackedExperts:
        """All experts."""
        sizes = self._columns, self._rows
        return PackedExperts(MXFP4, self._data, self._scales, None, MXFP4_GROUP, 1, MXFP4_COLUMNS, *sizes)


class IntegerExperts:
    """Packs experts of integers with 4 or 8 bits.

    Args:
        first: The first expert's weight.
        num_experts: Number of experts.
    """

    def __init__(self, first: IntegerWeight, num_experts: int) -> None:
        self._shape = rows, columns = first.values.shape
        self._group_size, self._bits, self._rounded = first.group_size, first.bits, first.int8_activations
        self._inner = quantized_linear.inner_columns(columns, first.group_size)
        device, dtype = first.values.device, torch.uint8 if first.bits == 4 else torch.int8
        row_bytes = (columns + -columns % self._inner) * first.bits // 8
        groups = num_experts, first.scales.shape[1], rows
        self._data = torch.empty((num_experts, rows, row_bytes), dtype=dtype, device=device)
        self._scales = torch.empty(groups, dtype=torch.float32, device=device)
        has_zeros = first.zero_points is not None
        self._zeros = torch.empty(groups, dtype=torch.int8, device=device) if has_zeros else None

    def put(self, expert: int, weight: IntegerWeight) -> None:
        """Packs one expert."""
        self._data[expert] = quantized_linear.pack_values(weight.values, self._bits, self._inner)
        self._scales[expert] = weight.scales.T
        if self._zeros is not None and weight.zero_points is not None:
            self._zeros[expert] = weight.zero_points.T

    def packed(self) -> PackedExperts:
        """All experts."""
        rows, columns = self._shape
        sizes = self._group_size, 1, self._inner, columns, rows
        kind = INT4 if self._bits == 4 else INT8
        return PackedExperts(kind, self._data, self._scales, self._zeros, *sizes, rounded=self._rounded)


class FloatExperts:
    """Packs experts of 8-bit floats.

    Static scales of inputs become one scale, the largest, so that no expert's inputs are clamped.

    Args:
        first: The first expert's weight.
        num_experts: Number of experts.
        float8: As for `float8_weight.pack`.
        native: Likewise.
    """

    def __init__(self, first: Float8Weight, num_experts: int, float8: torch.dtype, native: bool) -> None:
        self._shape = rows, columns = first.codes.shape
        self._float8, self._native, self._rounded = float8, native, first.inputs != "floats"
        self._block = first.block_rows, min(first.block_columns, columns)
        device = first.codes.device
        self._data = torch.zeros((num_experts, rows, columns + -columns % 16), dtype=torch.uint8, device=device)
        scales = num_experts, first.scales.shape[1], first.scales.shape[0]
        self._scales = torch.empty(scales, dtype=torch.float32, device=device)
        self._input_scales: list[torch.Tensor] = []

    def put(self, expert: int, weight: Float8Weight) -> None:
        """Packs one expert."""
        codes, scales, input_scale = float8_weight.in_format(weight, self._float8)
        self._data[expert, :, : self._shape[1]] = codes
        self._scales[expert] = scales.T
        if input_scale is not None:
            self._input_scales.append(input_scale)

    def packed(self) -> PackedExperts:
        """All experts."""
        rows, columns = self._shape
        block_rows, block_columns = self._block
        inner = 128 if block_columns >= columns else min(128, block_columns)
        input_scale = torch.stack(self._input_scales).amax(dim=0) if self._input_scales else None
        data = self._data.view(self._float8)
        sizes = block_columns, block_rows, inner, columns, rows
        return PackedExperts(
            FLOAT8, data, self._scales, None, *sizes, self._rounded, input_scale, native=self._native
        )  # fmt: skip

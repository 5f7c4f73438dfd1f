"""Linear layers with int8 and int4 weights, weight-only or with activations rounded to int8."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from mvllm_triton.device import has_ptx, multiplies_from_registers, processors
from mvllm_triton.dtypes import TRITON_DTYPES
from mvllm_triton.kernels import quantized_linear as kernels
from mvllm_triton.split_k import partial_results, splitk_reduce
from mvllm_triton.tiles import inner_splits, most_splits, power_of_two, quantized_tiles


class IntegerWeight(Protocol):
    """A matrix of small integers, w = (value - zero_point) * scale. Core's `QuantizedWeight` implements it."""

    @property
    def values(self) -> torch.Tensor:
        """[out_features, in_features], int8; with 4 bits from -8 to 7."""

    @property
    def scales(self) -> torch.Tensor:
        """[out_features, groups], float32."""

    @property
    def zero_points(self) -> torch.Tensor | None:
        """[out_features, groups], int8; None if all are zero."""

    @property
    def group_size(self) -> int:
        """Columns that share a scale."""

    @property
    def bits(self) -> int:
        """8 or 4."""

    @property
    def int8_activations(self) -> bool:
        """Whether the input is rounded to int8 with a scale per row."""


@dataclass(frozen=True)
class PackedIntegers:
    """A weight in the layout of the kernel (kernels/quantized_linear.py). Made by `pack`.

    Attributes:
        data: The integers.
        scales, zero_points: The weight's, [groups, out_features].
        group_size, bits, int8_activations: The weight's.
        in_features, out_features: Its sizes.
        inner: Columns that are multiplied at once.
    """

    data: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None
    group_size: int
    bits: int
    int8_activations: bool
    in_features: int
    out_features: int
    inner: int


def refusals(in_features: int, group_size: int, bits: int) -> list[str]:
    """Reasons why a weight cannot be packed; empty if it can."""
    reasons = []
    if bits not in (4, 8):
        reasons.append(f"weights have 8 or 4 bits, not {bits}")
    if group_size < in_features and group_size % 32:
        reasons.append(f"groups have a multiple of 32 columns, or all {in_features}, not {group_size}")
    return reasons


def pack(weight: IntegerWeight) -> PackedIntegers:
    """The weight in the kernel's layout.

    Raises:
        ValueError: The weight cannot be packed; see `refusals`.
    """
    values = weight.values
    out_features, in_features = values.shape
    reasons = refusals(in_features, weight.group_size, weight.bits)
    if reasons:
        raise ValueError(f"This weight cannot be packed: {'; '.join(reasons)}.")
    inner = inner_columns(in_features, weight.group_size)
    zeros = weight.zero_points
    return PackedIntegers(
        pack_values(values, weight.bits, inner),
        weight.scales.float().T.contiguous(),
        None if zeros is None else zeros.T.contiguous(),
        weight.group_size,
        weight.bits,
        weight.int8_activations,
        in_features,
        out_features,
        inner,
    )


def pack_values(values: torch.Tensor, bits: int, inner: int) -> torch.Tensor:
    """Integers [rows, columns], int8, in the layout of the kernel: whole blocks of `inner` columns."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % inner))
    if bits == 4:
        low, high = (padded.view(len(values), -1, 2, inner // 2) + 8).to(torch.uint8).unbind(2)
        padded = (low | (high << 4)).view(len(values), -1)
    return padded.contiguous()


def quantized_linear(x: torch.Tensor, weight: PackedIntegers, bias: torch.Tensor | None) -> torch.Tensor:
    """x · weightᵀ + bias with a weight of integers with scales.

    Weight-only: the products of integers and `x` are summed in float32 and multiplied with the scale of their group;
    the result is rounded once. With int8 activations each row of `x` is rounded to int8 with its own scale, and sums
    are exact.

    Args:
        x: [..., in_features], compute dtype.
        weight: The packed weight.
        bias: [out_features] or None.

    Returns:
        [..., out_features], compute dtype.
    """
    rows = x.reshape(-1, weight.in_features)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    num_rows = rows.shape[0]
    out = torch.empty((num_rows, weight.out_features), dtype=x.dtype, device=x.device)
    if num_rows:
        row_scales = rows  # an unused pointer
        if weight.int8_activations:
            rows, row_scales = scaled_int8_quant(rows)
        in_registers = weight.bits == 4 and multiplies_from_registers(x.device)
        tiles = quantized_tiles(
            num_rows, weight.out_features, x.element_size(), unpacked_in_registers=in_registers
        )  # fmt: skip
        grid = -(-num_rows // tiles.rows), -(-weight.out_features // tiles.columns)
        most = most_splits(tiles.rows, weight.out_features, weight.data.nbytes)
        splits = inner_splits(math.prod(grid), weight.in_features, weight.inner, processors(x.device), most=most)
        parts = partial_results(out, splits.num)
        kernels.quantized_gemm[(*grid, splits.num)](
            parts, rows, row_scales, weight.data, weight.scales,
            weight.data if weight.zero_points is None else weight.zero_points,
            weight.scales if bias is None else bias, num_rows, rows.stride(0), weight.data.stride(0),
            IN=weight.in_features,
            IN_PAD=weight.in_features + -weight.in_features % weight.inner,
            OUT=weight.out_features,
            GROUP_SIZE=weight.group_size,
            BITS=weight.bits,
            ZEROS=weight.zero_points is not None,
            INT8=weight.int8_activations,
            BIAS=bias is not None,
            DTYPE=TRITON_DTYPES[x.dtype],
            PTX=has_ptx(x.device, x.dtype),
            SPLITS=splits.num,
            CHUNK=splits.size,
            BLOCK_M=tiles.rows,
            BLOCK_N=tiles.columns,
            BLOCK_K=weight.inner,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )  # fmt: skip
        splitk_reduce(out, parts)
    return out.view(*x.shape[:-1], weight.out_features)


def inner_columns(in_features: int, group_size: int) -> int:
    """Columns multiplied at once: the largest power of two from 32 to 128 that divides a group."""
    if group_size >= in_features:
        return max(64, min(128, power_of_two(in_features)))
    return min(128, group_size & -group_size)


def scaled_int8_quant(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows rounded to int8, and a scale for each row."""
    num_rows, size = rows.shape
    codes = torch.empty((num_rows, size), dtype=torch.int8, device=rows.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=rows.device)
    block = min(2048, power_of_two(size))
    kernels.scaled_int8_quant[(num_rows,)](codes, scales, rows, rows.stride(0), SIZE=size, BLOCK=block, num_warps=4)
    return codes, scales

"""RTNMatrix: quantizes floats of a checkpoint to integers after loading, by rounding to nearest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from mvllm.layers.context import BuildContext
from mvllm.layers.matrix_layout import MatrixLayout
from mvllm.layers.quantization.interface import IntegerFormat
from mvllm.layers.quantization.quantized_matrix import ExpertFacts, IntegerMatrix, empty_integer_weight, staging
from mvllm.layers.weight_target import WeightTarget
from mvllm.ops.quantized_linear import QuantizedWeight

_BLOCK, _LARGEST_FACTOR = 256, 8
_ELEMENTS_AT_ONCE = 1 << 20  # rounded at a time, which bounds the memory for float32 copies


class RTNMatrix(IntegerMatrix):
    """Stages the layer's floats on the host, in the compute dtype.

    Those of an expert are rounded when they are loaded, and are kept in their bits until the layer is.

    Args:
        ctx, layout, format: As in IntegerMatrix.
        tied_to: Quantize this parameter instead of a checkpoint tensor.
    """

    checkpoint_has_floats = True

    def __init__(
        self, ctx: BuildContext, layout: MatrixLayout, format: IntegerFormat, tied_to: nn.Parameter | None = None
    ) -> None:
        super().__init__(ctx, layout, format)
        self._rounded: QuantizedWeight | None = None
        self._tied_to = [tied_to]  # in a list, so that it is not registered as a parameter
        self.floats = staging(layout.out_features, layout.num_columns, dtype=ctx.dtype) if tied_to is None else None

    def targets(self) -> Iterator[tuple[str, WeightTarget]]:
        if self.floats is not None:
            yield from float_targets(self.layout, self.floats)

    def expert_facts(self) -> ExpertFacts:
        return self._facts_of_expert()

    def tensors_loaded(self) -> None:
        weight, _ = self.read()
        values = pack_nibbles(weight.values) if weight.bits == 4 else weight.values
        self._rounded, self.floats = replace(weight, values=values), None

    def read(self) -> tuple[QuantizedWeight, torch.Tensor | None]:
        if self._rounded is not None:
            weight, size = self._rounded, self.layout.num_columns
            return (replace(weight, values=unpack_nibbles(weight.values, size)) if weight.bits == 4 else weight), None
        floats = self._tied_to[0] if self.floats is None else self.floats
        assert floats is not None
        return rounded(floats.detach(), self.format), None


def rounded(floats: torch.Tensor, format: IntegerFormat) -> QuantizedWeight:
    """Quantizes `floats` [out_features, in_features], as `round_rows`, a few rows at a time, on the host."""
    weight = empty_integer_weight(floats.shape[0], floats.shape[1], format)
    rows_at_once = max(1, _ELEMENTS_AT_ONCE // floats.shape[1])
    for start in range(0, floats.shape[0], rows_at_once):
        rows = slice(start, start + rows_at_once)
        round_rows(floats[rows].to(weight.scales.device).float(), weight, rows)
    return weight


def pack_nibbles(values: torch.Tensor) -> torch.Tensor:
    """Integers from -8 to 7 [rows, columns], int8, as [rows, ceil(columns / 2)]: the first of two in the low bits."""
    low, high = values[:, 0::2], torch.nn.functional.pad(values[:, 1::2], (0, values.shape[1] % 2))
    return (low & 15) | (high << 4)


def unpack_nibbles(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """The argument of `pack_nibbles`."""
    return torch.stack(((packed << 4) >> 4, packed >> 4), dim=2).flatten(1)[:, :columns].contiguous()


def float_targets(layout: MatrixLayout, parameter: nn.Parameter) -> Iterator[tuple[str, WeightTarget]]:
    """Targets of a layout's unquantized parts in a parameter [out_features, num_columns]."""
    for part in layout.parts:
        shape = (part.num_rows, layout.in_features)
        source = (part.source, layout.columns)
        if layout.transposed:
            shape, source = shape[::-1], source[::-1]
        destination = (part.destination, slice(0, layout.num_columns))
        yield f"{part.name}.weight", WeightTarget(parameter, shape, source, destination, layout.transposed)


def round_rows(floats: torch.Tensor, weight: QuantizedWeight, rows: slice) -> None:
    """Quantizes `floats` [rows, in_features], float32, to rows of `weight`, rounding to nearest.

    Without zero points a group's scale is its largest magnitude divided by the largest integer. With zero points it is
    the range of its values (extended to include zero, which stays exact) divided by the number of steps. The scale of a
    group with a NaN is NaN, so that a damaged checkpoint shows in its logits, as without quantization.

    Scales of 4-bit groups are increased by at most an eighth of the largest scale of 256 columns, so that those of
    every 256 columns are 1 to 8 times one bfloat16 number: a kernel can store them in a few bits and use integer
    multiplication.
    """
    largest, size, columns = 2 ** (weight.bits - 1) - 1, weight.group_size, floats.shape[1]
    whole = columns - columns % size  # the last group may have fewer columns than the others
    bands = [slice(start, stop) for start, stop in ((0, whole), (whole, columns)) if start < stop]
    grouped = [floats[:, band].unflatten(1, (-(-(band.stop - band.start) // size), -1)) for band in bands]
    lows: list[torch.Tensor | None] = [None] * len(bands)
    found = []
    for i, values in enumerate(grouped):  # [rows, groups, columns of a group]
        if weight.zero_points is None:
            found.append(values.abs().amax(dim=2) / largest)
        else:
            lows[i], high = values.amin(dim=2).clamp(max=0), values.amax(dim=2).clamp(min=0)
            found.append((high - lows[i]) / (2 * largest + 1))
    scales = torch.cat(found, dim=1)
    scales = _kept(scales, size) if scales.shape[1] > 1 and weight.bits == 4 else scales
    scales = scales.where(scales != 0, 1.0)
    for band, values, low in zip(bands, grouped, lows, strict=True):
        groups = slice(band.start // size, band.start // size + values.shape[1])
        steps, lowest = values / scales[:, groups, None], -largest
        if weight.zero_points is not None and low is not None:
            lowest -= 1
            zeros = (lowest - low / scales[:, groups]).round().clamp(lowest, largest)
            weight.zero_points[rows, groups] = zeros.to(torch.int8)
            steps += zeros[:, :, None]
        weight.values[rows, band] = steps.round_().clamp_(lowest, largest).to(torch.int8).flatten(1)
    weight.scales[rows] = scales


def _kept(scales: torch.Tensor, group_size: int) -> torch.Tensor:
    """The scales rounded up so that those of every 256 columns are 1 to 8 times one bfloat16 number."""
    if _BLOCK % group_size:
        return scales
    kept = torch.empty_like(scales)
    for start in range(0, scales.shape[1], _BLOCK // group_size):
        block = scales[:, start : start + _BLOCK // group_size]
        unit = _round_up_to_bfloat16(block.amax(dim=1, keepdim=True) / _LARGEST_FACTOR)
        unit = unit.where(unit != 0, 1.0)
        kept[:, start : start + block.shape[1]] = (block / unit).ceil().clamp(1, _LARGEST_FACTOR) * unit
    return kept


def _round_up_to_bfloat16(x: torch.Tensor) -> torch.Tensor:
    near = x.bfloat16()
    return torch.where(near < x, torch.nextafter(near, torch.full_like(near, torch.inf)), near).float()

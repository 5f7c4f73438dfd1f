"""Float8Matrix: an FP8 matrix with scales, kept as FP8 if an op provider supports it, else dequantized after loading.

    checkpoint, FP8              scales, one per block            this rank's matrix
    ┌──────┬──────┬──────┐       ┌───┬───┬───┐
    │   ┌──┼──────┼──┐   │       │   │   │   │   of the blocks   ┌──────────────┐
    ├───┼──┼──────┼──┼───┤   ×   ├───┼───┼───┤   that a share    │ w · its scale│
    │   └──┼──────┼──┘   │       │   │   │   │   touches         └──────────────┘
    └──────┴──────┴──────┘       └───┴───┴───┘

With a provider of the operation `float8_linear`, weights stay one byte each, and inputs are rounded if the checkpoint
requests it. Otherwise the operation `linear` multiplies with dequantized weights in the compute dtype without rounding
inputs, which takes twice the memory and is closer to the unquantized model.

A shard may begin within a block; both ranks then read its scale. A matrix that is kept has the largest blocks that are
aligned with its parts and columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mvllm.layers.context import BuildContext
from mvllm.layers.matrix_layout import MatrixLayout, Part
from mvllm.layers.quantization.interface import Float8Format
from mvllm.layers.quantization.quantized_matrix import ExpertFacts, Product, QuantizedMatrix, expert_facts, staging
from mvllm.layers.weight_target import WeightTarget, whole
from mvllm.ops.float8_linear import Float8Weight

_ELEMENTS_AT_ONCE = 1 << 20  # dequantized at a time, which bounds the memory for float32 copies
_INPUT_SCALE = "input_scale"


@dataclass(frozen=True)
class _BlockRange:
    """One dimension of a part: this rank's range, and the range of its scales.

    Attributes:
        size, block: Size of the whole dimension, and of a block.
        taken: This rank's range.
    """

    size: int
    block: int
    taken: slice

    @property
    def num_scales(self) -> int:
        return -(-self.size // self.block)

    @property
    def scales(self) -> slice:
        """Range of the blocks that overlap this rank's range."""
        return slice(self.taken.start // self.block, -(-self.taken.stop // self.block))

    @property
    def divisors(self) -> tuple[int, ...]:
        """Numbers that the block size of the kept matrix must divide; empty if one block covers the range."""
        return (self.block, self.taken.start) if _length(self.scales) > 1 else ()

    def spread(self, scales: torch.Tensor, dim: int, step: int = 1) -> torch.Tensor:
        """Expands the scales of blocks to one scale for every `step` elements of the range."""
        elements = torch.arange(self.taken.start, self.taken.stop, step) // self.block - self.scales.start
        return scales.index_select(dim, elements)


class Float8Matrix(QuantizedMatrix):
    """Stages a layer's FP8 and scales on the host.

    Args:
        ctx: Build context.
        layout: The parts of the matrix.
        format: Block sizes and name of the scales.
    """

    def __init__(self, ctx: BuildContext, layout: MatrixLayout, format: Float8Format) -> None:
        super().__init__()
        self.layout, self.format = layout, format
        self._dtype, self._device, self._place = ctx.dtype, ctx.device, ctx.place
        self._num_devices = ctx.num_devices
        sizes = {"in_features": layout.num_columns, "out_features": layout.out_features, "bias": layout.bias}
        self._rows, self._columns = self._kept_block()
        self._facts = {"block_rows": self._rows, "block_columns": self._columns, "inputs": format.inputs}
        self._is_kept, self._op = False, None
        if not layout.is_expert:
            floats, kept = ctx.op("linear", **sizes), ctx.op("float8_linear", **sizes, **self._facts)
            self._is_kept = kept.may_replace(floats)
            self._op = kept if self._is_kept else floats
        self.stored = nn.ModuleList(self._stage(part) for part in layout.parts)
        self._row_order: torch.Tensor | None = None

    def targets(self) -> Iterator[tuple[str, WeightTarget]]:
        for part, staged in zip(self.layout.parts, self.stored, strict=True):
            rows, columns = self._blocks(part)
            weight, scales = staged.get_parameter("weight"), staged.get_parameter("scales")
            taken = (rows.taken, columns.taken)
            yield f"{part.name}.weight", WeightTarget(weight, (rows.size, columns.size), taken, whole(weight))
            shape, source = (rows.num_scales, columns.num_scales), (rows.scales, columns.scales)
            yield f"{part.name}.{self.format.scale_tensor}", WeightTarget(scales, shape, source, whole(scales))
            if self._has_input_scale:
                scale = staged.get_parameter(_INPUT_SCALE)
                yield f"{part.name}.{_INPUT_SCALE}", WeightTarget(scale, (1,), whole(scale), whole(scale))

    def can_reorder_rows(self, order: torch.Tensor) -> bool:
        """If FP8 is kept, each row must stay among those with its scales, or have scales of its own."""
        if not self._is_kept or self._rows == 1:
            return True
        return bool((order // self._rows == torch.arange(len(order)) // self._rows).all())

    def reorder_rows(self, order: torch.Tensor) -> None:
        self._row_order = order

    def finish(self) -> tuple[Product, Any]:
        assert self._op is not None, "an expert has no product of its own"
        weight: Float8Weight | torch.Tensor
        if self._is_kept:
            weight = self._read()
        else:
            floats = self._place(self._floats(self._dtype).to(self._device), self.layout.partition)
            weight = nn.Parameter(floats, requires_grad=False)
        if self._op.prepare is not None:
            weight = self._op.prepare(weight if isinstance(weight, Float8Weight) else weight.data)
        return self._op.function, weight

    def dequantized(self, num_columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._floats(dtype).to(device)

    def expert_facts(self) -> ExpertFacts:
        return expert_facts("float8_linear", self._facts)

    def keep_quantized(self) -> None:
        self._is_kept = True
        if self._has_input_scale:
            for staged in self.stored:
                staged.register_parameter(_INPUT_SCALE, staging(1, dtype=torch.float32))

    def expert_weight(self) -> Float8Weight:
        return self._read()

    @property
    def _has_input_scale(self) -> bool:
        return self._is_kept and self.format.inputs == "static"

    def _floats(self, dtype: torch.dtype) -> torch.Tensor:
        """[out_features, num_columns], on the host."""
        weight = torch.zeros(self.layout.out_features, self.layout.num_columns, dtype=dtype)
        for part, staged in zip(self.layout.parts, self.stored, strict=True):
            rows, columns = self._blocks(part)
            codes, scales = staged.get_parameter("weight").detach(), staged.get_parameter("scales").detach()
            of_rows, rows_at_once = rows.spread(scales, 0), max(1, _ELEMENTS_AT_ONCE // codes.shape[1])
            for start in range(0, len(codes), rows_at_once):
                piece = slice(start, start + rows_at_once)
                weight[part.destination][piece] = codes[piece].float() * columns.spread(of_rows[piece], 1)
        return weight if self._row_order is None else weight[self._row_order]

    def _read(self) -> Float8Weight:
        """The weight in FP8, on the device; rows that no part fills are zero."""
        shape = self.layout.out_features, self.layout.num_columns
        codes = torch.zeros(shape, dtype=torch.uint8)
        scales = torch.ones(-(-shape[0] // self._rows), -(-shape[1] // self._columns))
        for part, staged in zip(self.layout.parts, self.stored, strict=True):
            rows, columns = self._blocks(part)
            codes[part.destination] = staged.get_parameter("weight").detach().view(torch.uint8)
            of_rows = rows.spread(staged.get_parameter("scales").detach(), 0, self._rows)
            first = part.destination.start // self._rows
            scales[first : first + len(of_rows)] = columns.spread(of_rows, 1, self._columns)
        if self._row_order is not None:
            codes = codes[self._row_order]
            scales = scales[self._row_order] if self._rows == 1 else scales
        input_scale = None
        if self._has_input_scale:  # one input has one scale: the largest, so that no part's inputs are clamped
            stored = [staged.get_parameter(_INPUT_SCALE).detach() for staged in self.stored]
            input_scale = torch.stack(stored).amax(dim=0).to(self._device)
        partition = self.layout.partition
        of_scales = partition if partition is None or scales.shape[partition] % self._num_devices == 0 else None
        return Float8Weight(
            self._place(codes.to(self._device), partition),
            self._place(scales.to(self._device), of_scales),
            self._rows,
            self._columns,
            self.format.inputs,
            input_scale,
        )

    def _kept_block(self) -> tuple[int, int]:
        """Rows and columns of the largest blocks that are aligned with this rank's parts and columns."""
        blocks = [self._blocks(part) for part in self.layout.parts]
        starts = [part.destination.start for part in self.layout.parts]
        rows = math.gcd(*starts, *(n for of_rows, _ in blocks for n in of_rows.divisors))
        columns = math.gcd(*blocks[0][1].divisors)
        return (
            min(rows or self.layout.out_features, self.layout.out_features),
            min(columns or self.layout.num_columns, self.layout.num_columns),
        )

    def _blocks(self, part: Part) -> tuple[_BlockRange, _BlockRange]:
        size_in = self.layout.in_features
        return (
            _BlockRange(part.num_rows, self.format.block_rows or part.num_rows, part.source),
            _BlockRange(size_in, self.format.block_columns or size_in, self.layout.columns),
        )

    def _stage(self, part: Part) -> nn.Module:
        rows, columns = self._blocks(part)
        module = nn.Module()
        num_rows, num_columns = _length(rows.taken), _length(columns.taken)
        module.register_parameter("weight", staging(num_rows, num_columns, dtype=torch.float8_e4m3fn))
        module.register_parameter("scales", staging(_length(rows.scales), _length(columns.scales), dtype=torch.float32))
        if self._has_input_scale:
            module.register_parameter(_INPUT_SCALE, staging(1, dtype=torch.float32))
        return module


def _length(taken: slice) -> int:
    return int(taken.stop - taken.start)

"""A matrix of FP8 with scales, which becomes floats of the compute dtype once it is loaded.

    checkpoint, FP8              scales, one per block            this rank's matrix
    ┌──────┬──────┬──────┐       ┌───┬───┬───┐
    │   ┌──┼──────┼──┐   │       │   │   │   │   of the blocks   ┌──────────────┐
    ├───┼──┼──────┼──┼───┤   ×   ├───┼───┼───┤   that a share    │ w · its scale│
    │   └──┼──────┼──┘   │       │   │   │   │   touches         └──────────────┘
    └──────┴──────┴──────┘       └───┴───┴───┘

So the operation `linear` multiplies with it, on every platform, and inputs are not rounded: what comes out is nearer to
the model before it was quantized than with inputs of FP8. A share may begin within a block: both ranks read its scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mvllm.layers.context import BuildContext
from mvllm.layers.matrix_layout import MatrixLayout, Part
from mvllm.layers.quantization.interface import Float8Format
from mvllm.layers.quantization.matrix import Product, QuantizedMatrix, staging
from mvllm.layers.weight_target import WeightTarget

_ELEMENTS_AT_ONCE = 1 << 20  # multiplied at one time: their float32 copies are all the memory that it takes beside


@dataclass(frozen=True)
class _Blocks:
    """One dimension of a part: what a rank takes of it, and the scales for that.

    Attributes:
        size, block: Of the whole dimension, and of a block.
        taken: What the rank takes.
    """

    size: int
    block: int
    taken: slice

    @property
    def num_scales(self) -> int:
        return -(-self.size // self.block)

    @property
    def scales(self) -> slice:
        """Those of the blocks that the rank's share touches."""
        return slice(self.taken.start // self.block, -(-self.taken.stop // self.block))

    def spread(self, scales: torch.Tensor, dim: int) -> torch.Tensor:
        """One scale per block to one per element that is taken."""
        elements = torch.arange(self.taken.start, self.taken.stop) // self.block - self.scales.start
        return scales.index_select(dim, elements)


class Float8Matrix(QuantizedMatrix):
    """Stages a layer's FP8 and scales on the host.

    Args:
        ctx: Build context.
        layout: What the matrix is made of.
        format: How the scales lie.
    """

    def __init__(self, ctx: BuildContext, layout: MatrixLayout, format: Float8Format) -> None:
        super().__init__()
        self.layout, self.format = layout, format
        self._dtype, self._device, self._place = ctx.dtype, ctx.device, ctx.place
        self._op = ctx.op("linear", in_features=layout.num_columns, out_features=layout.out_features, bias=layout.bias)
        self.stored = nn.ModuleList(self._stage(part) for part in layout.parts)

    def targets(self) -> Iterator[tuple[str, WeightTarget]]:
        for part, staged in zip(self.layout.parts, self.stored, strict=True):
            rows, columns = self._blocks(part)
            weight, scales = staged.get_parameter("weight"), staged.get_parameter("scales")
            taken = (rows.taken, columns.taken)
            yield f"{part.name}.weight", WeightTarget(weight, (rows.size, columns.size), taken, _all_of(weight))
            shape, source = (rows.num_scales, columns.num_scales), (rows.scales, columns.scales)
            yield f"{part.name}.{self.format.scale_tensor}", WeightTarget(scales, shape, source, _all_of(scales))

    def finish(self) -> tuple[Product, Any]:
        weight = torch.zeros(self.layout.out_features, self.layout.num_columns, dtype=self._dtype)
        for part, staged in zip(self.layout.parts, self.stored, strict=True):
            rows, columns = self._blocks(part)
            codes, scales = staged.get_parameter("weight").detach(), staged.get_parameter("scales").detach()
            of_rows, rows_at_once = rows.spread(scales, 0), max(1, _ELEMENTS_AT_ONCE // codes.shape[1])
            for start in range(0, len(codes), rows_at_once):
                piece = slice(start, start + rows_at_once)
                weight[part.destination][piece] = codes[piece].float() * columns.spread(of_rows[piece], 1)
        placed = nn.Parameter(self._place(weight.to(self._device), self.layout.partition), requires_grad=False)
        return self._op.function, placed if self._op.prepare is None else self._op.prepare(placed.data)

    def _blocks(self, part: Part) -> tuple[_Blocks, _Blocks]:
        size_in = self.layout.in_features
        return (
            _Blocks(part.num_rows, self.format.block_rows or part.num_rows, part.source),
            _Blocks(size_in, self.format.block_columns or size_in, self.layout.columns),
        )

    def _stage(self, part: Part) -> nn.Module:
        rows, columns = self._blocks(part)
        module = nn.Module()
        num_rows, num_columns = _length(rows.taken), _length(columns.taken)
        module.register_parameter("weight", staging(num_rows, num_columns, dtype=torch.float8_e4m3fn))
        module.register_parameter("scales", staging(_length(rows.scales), _length(columns.scales), dtype=torch.float32))
        return module


def _length(taken: slice) -> int:
    return int(taken.stop - taken.start)


def _all_of(tensor: torch.Tensor) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in tensor.shape)

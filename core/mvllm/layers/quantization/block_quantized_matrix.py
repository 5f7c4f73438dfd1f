"""BlockQuantizedMatrix: a matrix in blocks (`mvllm.ops.block_formats`), for the operation `block_quantized_linear`.

checkpoint tensors, uint8                        this rank's matrix: each part has a format
┌──────────────────────────┐                     ┌────────────┐
│  ┌───────┐  rows exactly,│   ───────────▶      │ q   (Q4_K) │   Columns are split between blocks only. A matrix
│  └───────┘  columns in   │                     ├────────────┤   whose shard splits a block is dequantized.
│             whole blocks │                     │ k   (Q4_K) │
└──────────────────────────┘                     ├────────────┤
                                                 │ v   (Q6_K) │
                                                 └────────────┘
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from mvllm.layers.context import BuildContext
from mvllm.layers.matrix_layout import MatrixLayout
from mvllm.layers.quantization.matrix_interface import OpSource
from mvllm.layers.quantization.quantized_matrix import (
    ExpertFacts,
    Lookup,
    Product,
    QuantizedMatrix,
    expert_facts,
    staging,
)
from mvllm.layers.weight_target import WeightTarget
from mvllm.ops.block_formats import BLOCK_FORMATS
from mvllm.ops.block_quantized_linear import BlockQuantizedPart, BlockQuantizedWeight
from mvllm.ops.registry import ResolvedOp


class BlockQuantizedMatrix(QuantizedMatrix):
    """Stages a layer's blocks on the host. Created by `build`.

    Args:
        ctx: Build context.
        layout: The adjacent parts of the matrix; rows after the last part are zero.
        formats: The format of each part.
        op: The operation `block_quantized_linear`; None for an expert.
        facts: The facts of the operation, without the number of rows.
    """

    checkpoint_has_floats = True

    def __init__(
        self,
        ctx: BuildContext,
        layout: MatrixLayout,
        formats: Sequence[str],
        op: ResolvedOp | None,
        facts: dict[str, Any],
    ) -> None:
        super().__init__()
        self.layout, self.formats = layout, tuple(formats)
        self._dtype, self._device, self._op, self._facts = ctx.dtype, ctx.device, op, facts
        self.stored = nn.ParameterList(
            staging(rows, known.row_bytes(layout.num_columns), dtype=torch.uint8)
            for rows, known in zip(_rows_of_parts(layout), self._known(), strict=True)
        )

    @classmethod
    def build(cls, ctx: BuildContext, layout: MatrixLayout, formats: Sequence[str]) -> BlockQuantizedMatrix | None:
        """The matrix; None if a part has no block format, a block would be split, or no provider has the operation.

        For an expert, no provider is needed here: its layer resolves `quantized_moe`.
        """
        if not all(name in BLOCK_FORMATS for name in formats) or not _is_in_order(layout):
            return None
        sizes = [BLOCK_FORMATS[name].block_values for name in formats]
        if any(end % size for size in sizes for end in (layout.columns.start, layout.columns.stop, layout.in_features)):
            return None
        facts = {
            "in_features": layout.num_columns,
            "bias": layout.bias,
            "formats": tuple(formats),
            "int8_activations": ctx.dtype != torch.float32,
        }
        if layout.is_expert:
            return cls(ctx, layout, formats, None, facts)
        op = ctx.op("block_quantized_linear", out_features=layout.out_features, **facts)
        floats = ctx.op("linear", in_features=layout.num_columns, out_features=layout.out_features, bias=layout.bias)
        return cls(ctx, layout, formats, op, facts) if op.may_replace(floats) else None

    def targets(self) -> Iterator[tuple[str, WeightTarget]]:
        for part, known, parameter in zip(self.layout.parts, self._known(), self.stored, strict=True):
            columns = slice(known.row_bytes(self.layout.columns.start), known.row_bytes(self.layout.columns.stop))
            shape = part.num_rows, known.row_bytes(self.layout.in_features)
            filled = slice(0, part.source.stop - part.source.start), slice(0, parameter.shape[1])
            yield f"{part.name}.packed_weight", WeightTarget(parameter, shape, (part.source, columns), filled)

    def fuse_silu_and_mul(self, ctx: OpSource, activation: ResolvedOp) -> bool:
        assert self._op is not None, "an expert has no activation of its own"
        fused = ctx.op("block_quantized_linear_silu_and_mul", size=self.layout.out_features // 2, **self._facts)
        if not fused.may_replace(self._op, activation):
            return False
        self._op = fused
        return True

    def finish(self) -> tuple[Product, Any]:
        assert self._op is not None, "an expert has no product of its own"
        weight = self._read()
        return self._op.function, weight if self._op.prepare is None else self._op.prepare(weight)

    @property
    def lookup(self) -> Lookup | None:
        return None if self._op is None else self._op.lookup

    def expert_facts(self) -> ExpertFacts:
        return expert_facts("block_quantized_linear", self._facts)

    def expert_weight(self) -> BlockQuantizedWeight:
        return self._read()

    def dequantized(self, num_columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._read().dequantize().to(device, dtype)

    def _read(self) -> BlockQuantizedWeight:
        parts = (
            BlockQuantizedPart(name, parameter.detach().to(self._device))
            for name, parameter in zip(self.formats, self.stored, strict=True)
        )
        columns, int8_activations = self.layout.num_columns, bool(self._facts["int8_activations"])
        return BlockQuantizedWeight(tuple(parts), columns, int8_activations, self._dtype)

    def _known(self) -> list[Any]:
        return [BLOCK_FORMATS[name] for name in self.formats]


def _is_in_order(layout: MatrixLayout) -> bool:
    """Whether each part begins at the end of the previous one."""
    ends = [0, *(part.destination.stop for part in layout.parts)]
    return all(part.destination.start == end for part, end in zip(layout.parts, ends, strict=False))


def _rows_of_parts(layout: MatrixLayout) -> list[int]:
    """Number of rows from the start of each part to the start of the next, or to the end of the matrix."""
    starts = [part.destination.start for part in layout.parts]
    return [stop - start for start, stop in zip(starts, [*starts[1:], layout.out_features], strict=True)]

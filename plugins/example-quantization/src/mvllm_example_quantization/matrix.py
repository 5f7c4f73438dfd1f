"""Reads ternary matrices; the engine's operation for 4-bit weights multiplies with them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from mvllm.extension_api import (
    BuildContext,
    ConfigError,
    IntegerFormat,
    IntegerMatrix,
    MatrixLayout,
    QuantizedWeight,
    WeightTarget,
    staging,
)

PER_BYTE = 4


class TernaryMatrix(IntegerMatrix):
    """Bytes and scales of one linear layer's matrix, until it is loaded."""

    def __init__(self, ctx: BuildContext, layout: MatrixLayout) -> None:
        super().__init__(ctx, layout, IntegerFormat(bits=4))
        start, stop = layout.columns.start, layout.columns.stop
        if start % PER_BYTE or stop % PER_BYTE:
            raise ConfigError(
                f"{layout}: tensor_parallel_size={ctx.tp.world_size} cuts its columns within bytes of {PER_BYTE}: "
                "use a smaller one."
            )
        self.bytes_read = slice(start // PER_BYTE, stop // PER_BYTE)
        self.packed = staging(layout.out_features, layout.num_columns // PER_BYTE, dtype=torch.uint8)
        self.scale = staging(layout.out_features, dtype=torch.float32)

    def targets(self) -> Iterator[tuple[str, WeightTarget]]:
        for part in self.layout.parts:
            yield from self._of_part(part.name, part.num_rows, part.source, part.destination)

    def read(self) -> tuple[QuantizedWeight, torch.Tensor | None]:
        weight = self.empty_weight()
        for place in range(PER_BYTE):
            weight.values[:, place::PER_BYTE] = ((self.packed.data >> (2 * place)) & 3).to(torch.int8) - 1
        weight.scales[:, 0] = self.scale.data
        return weight, None

    def _of_part(self, name: str, rows: int, source: slice, place: slice) -> Iterator[tuple[str, WeightTarget]]:
        width = self.packed.shape[1]
        shape = (rows, self.layout.in_features // PER_BYTE)
        yield f"{name}.ternary", WeightTarget(self.packed, shape, (source, self.bytes_read), (place, slice(0, width)))
        yield f"{name}.scale", WeightTarget(self.scale, (rows,), (source,), (place,))


def pack(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest ternary matrix to `weight` [out, in]: bytes [out, in / 4] and scales [out].

    The scale is the mean magnitude of the values that are not rounded to zero, those above half of the row's mean.
    """
    weight = weight.float()
    threshold = weight.abs().mean(dim=1, keepdim=True) / 2
    signs = weight.sign() * (weight.abs() > threshold)
    scale = (weight * signs).sum(dim=1) / signs.abs().sum(dim=1).clamp(min=1)
    codes = (signs + 1).to(torch.uint8)
    packed = torch.zeros(weight.shape[0], weight.shape[1] // PER_BYTE, dtype=torch.uint8)
    for place in range(PER_BYTE):
        packed |= codes[:, place::PER_BYTE] << (2 * place)
    return packed, scale


def unpack(packed: nn.Parameter | torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The floats [out, in] that `pack` stored."""
    columns = [((packed >> (2 * place)) & 3).float() - 1 for place in range(PER_BYTE)]
    return torch.stack(columns, dim=-1).flatten(1) * scale[:, None]

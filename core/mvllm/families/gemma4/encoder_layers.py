"""Layers of the encoders of Gemma 4: projections that limit the range of their values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from mvllm.layers.checkpoint_tensor import CheckpointTensor
from mvllm.layers.context import BuildContext
from mvllm.layers.linear import ColumnParallelLinear


class ClippedProjection(nn.Module):
    """Linear layers over the same input, [in] to [out] each: in one product, or each with limits of its own."""

    def __init__(self, ctx: BuildContext, names: Sequence[str], size: int, outs: Sequence[int], clips: bool) -> None:
        super().__init__()
        self._outs = tuple(outs)
        bands = [(f"{name}.linear", out) for name, out in zip(names, outs, strict=True)]
        groups = [[band] for band in bands] if clips else [bands]
        self.linears = nn.ModuleList(ColumnParallelLinear(ctx, group, size, bias=False) for group in groups)
        limits = ("input_min", "input_max", "output_min", "output_max") if clips else ()
        of_all = [[CheckpointTensor(ctx, f"{name}.{limit}") for limit in limits] for name in names]
        self.limits = nn.ModuleList(nn.ModuleList(each) for each in of_all)
        self._limits = of_all  # the same, typed

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] to [T, sum of outs]."""
        return torch.cat(list(self(x)), dim=-1) if self._limits[0] else self.linears[0](x)

    def forward(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """[T, in] to [T, out] of each layer."""
        if not self._limits[0]:
            return self.linears[0](x).split(self._outs, dim=-1)
        results = []
        for linear, limits in zip(self.linears, self._limits, strict=True):
            lowest, highest, lowest_result, highest_result = (each.weight for each in limits)
            results.append(linear(x.clamp(lowest, highest)).clamp(lowest_result, highest_result))
        return results

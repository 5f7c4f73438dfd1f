"""FusedMoE: the experts of a mixture of experts with a separate checkpoint tensor for each matrix of each expert.

Tensor parallelism shards every expert along its inner size, so that the load of the ranks does not depend on the
routing; `forward` returns this rank's summand of a sum over ranks. The devices of a worker with several devices hold
some of the experts each, or all of them if the number of experts is not a multiple of the number of devices.

The operation takes floats. Experts that a checkpoint stores quantized are dequantized after loading; online
quantization does not apply to experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from mvllm.layers.context import BuildContext
from mvllm.layers.linear import shard_slice
from mvllm.layers.matrix_layout import MatrixLayout, Part
from mvllm.layers.quantization.quantized_matrix import QuantizedMatrix
from mvllm.layers.quantization.rtn_matrix import float_targets
from mvllm.layers.weight_target import WeightTarget


class FusedMoE(nn.Module):
    """Experts gated by silu, each of three matrices of its own.

    Args:
        ctx: Build context.
        name: The checkpoint module whose children `0`, `1`, ... are the experts.
        hidden_size, intermediate_size: Outer and inner size of one expert.
        num_experts, top_k: Experts in all, and per token.
        names: Checkpoint names of gate, up and down of an expert.

    Attributes:
        gate_up: [num_experts, 2 · size, hidden_size], where `size` is this rank's part of the inner size; after loading
            the result of the op provider's `prepare`.
        down: [num_experts, hidden_size, size], likewise.
    """

    gate_up: Any
    down: Any

    def __init__(
        self,
        ctx: BuildContext,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        top_k: int,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        super().__init__()
        self.hidden_size, self.num_experts = hidden_size, num_experts
        band = shard_slice(intermediate_size, ctx.shares, f"inner elements of {name}")
        size = band.stop - band.start
        self.partitions: Mapping[str, int] = {} if num_experts % ctx.num_devices else {"gate_up": 0, "down": 0}
        self._place = ctx.place
        self.gate_up = ctx.parameter(num_experts, 2 * size, hidden_size)
        self.down = ctx.parameter(num_experts, hidden_size, size)
        self._op = ctx.op("moe", num_experts=num_experts, top_k=top_k, hidden_size=hidden_size, intermediate_size=size)
        self._moe = self._op.function
        gate_name, up_name, down_name = names
        outer = slice(0, hidden_size)
        self._layouts: list[tuple[MatrixLayout, MatrixLayout]] = []
        self.stored = nn.ModuleDict()
        for e in range(num_experts):
            upper = Part(f"{name}.{e}.{gate_name}", intermediate_size, band, slice(0, size))
            lower = Part(f"{name}.{e}.{up_name}", intermediate_size, band, slice(size, 2 * size))
            outwards = Part(f"{name}.{e}.{down_name}", hidden_size, outer, outer)
            layouts = (
                MatrixLayout((upper, lower), hidden_size, outer, 2 * size),
                MatrixLayout((outwards,), intermediate_size, band, hidden_size),
            )
            self._layouts.append(layouts)
            for which, layout in enumerate(layouts):
                stored = quantization_of_layout(ctx, layout)
                if stored is not None:
                    self.stored[f"{e} {which}"] = stored
        if len(self.stored) == 2 * num_experts:  # no checkpoint tensor fills these directly
            gate_up, down = self.gate_up.data, self.down.data
            del self.gate_up, self.down
            self.gate_up, self.down = gate_up, down

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """This rank's summand of the experts' weighted sum.

        Args:
            x: [T, hidden_size].
            weights, ids: [T, top_k], float32 and int64: the experts of each token.

        Returns:
            [T, hidden_size].
        """
        return self._moe(x, self.gate_up, self.down, ids, weights)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Checkpoint tensor names and their targets on this rank. Before `prepare_weights` only."""
        for e, layouts in enumerate(self._layouts):
            for which, (layout, parameter) in enumerate(zip(layouts, (self.gate_up, self.down), strict=True)):
                stored = self.stored.get_submodule(f"{e} {which}") if f"{e} {which}" in self.stored else None
                if isinstance(stored, QuantizedMatrix):
                    yield from stored.targets()
                    continue
                for name, target in float_targets(layout, parameter):
                    place = (e, *target.destination)
                    yield name, WeightTarget(parameter, target.source_shape, target.source, place)

    def prepare_weights(self) -> None:
        """Converts the loaded experts to the op provider's form."""
        for key in list(self.stored):
            e, which = map(int, key.split())
            floats, stored = (self.gate_up, self.down)[which].data, self.stored.pop(key)
            assert isinstance(stored, QuantizedMatrix)
            floats[e] = stored.dequantized(floats.shape[-1], floats.dtype, floats.device)
        for name in ("gate_up", "down"):
            if not isinstance(getattr(self, name), nn.Parameter):  # parameters are placed when they have been loaded
                setattr(self, name, self._place(getattr(self, name), self.partitions.get(name)))
        if self._op.prepare is not None:
            prepared = self._op.prepare((self.gate_up.data, self.down.data))
            del self.gate_up, self.down
            self.gate_up, self.down = prepared


def quantization_of_layout(ctx: BuildContext, layout: MatrixLayout) -> QuantizedMatrix | None:
    """The quantized matrix of a layer that multiplies floats only; None if the checkpoint stores floats."""
    if ctx.quantization is None or ctx.quantization.quantizes_on_load:
        return None
    return ctx.quantized(layout)

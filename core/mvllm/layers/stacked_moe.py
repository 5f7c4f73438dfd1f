"""StackedMoE: the experts of a mixture of experts with one checkpoint tensor for each matrix of all experts.

    gate_up_proj    [experts, 2 · inner, hidden_size]    the rows of gate, then those of up
    down_proj       [experts, hidden_size, inner]

Sharded as FusedMoE: every rank has a part of the inner elements of every expert. Quantized experts in this form are not
supported, and quantization on load leaves the experts as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from mvllm.layers.context import BuildContext
from mvllm.layers.linear import shard_slice
from mvllm.layers.weight_target import WeightTarget


class StackedMoE(nn.Module):
    """Experts with a gate.

    Args:
        ctx: Build context.
        name: The checkpoint module.
        hidden_size, intermediate_size: Outer and inner size of one expert.
        num_experts, top_k: Number of experts, and experts per token.
        op: The operation: `moe` for a silu gate, or `gelu_tanh_moe`.
        names: Checkpoint names of both tensors.

    Attributes:
        gate_up, down: As in FusedMoE.
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
        op: str = "moe",
        names: tuple[str, str] = ("gate_up_proj", "down_proj"),
    ) -> None:
        super().__init__()
        self._names = names
        self.name, self.hidden_size, self.num_experts = name, hidden_size, num_experts
        self._inner = intermediate_size
        self._band = shard_slice(intermediate_size, ctx.shares, f"inner elements of {name}")
        size = self._band.stop - self._band.start
        self.partitions: Mapping[str, int] = {} if num_experts % ctx.num_devices else {"gate_up": 0, "down": 0}
        sizes = {"num_experts": num_experts, "top_k": top_k, "hidden_size": hidden_size, "intermediate_size": size}
        self._op = ctx.op(op, **sizes)
        self._moe = self._op.function
        self.gate_up = ctx.parameter(num_experts, 2 * size, hidden_size)
        self.down = ctx.parameter(num_experts, hidden_size, size)

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """This rank's partial sum of the weighted expert outputs, as FusedMoE.forward.

        Args:
            x: [T, hidden_size].
            weights, ids: [T, top_k], float32 and int64: the experts of each token.

        Returns:
            [T, hidden_size].
        """
        return self._moe(x, self.gate_up, self.down, ids, weights)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Checkpoint tensor names and their targets on this rank. Before `prepare_weights` only."""
        experts, outer, band, inner = slice(0, self.num_experts), slice(0, self.hidden_size), self._band, self._inner
        size = band.stop - band.start
        shape = (self.num_experts, 2 * inner, self.hidden_size)
        for half in (0, 1):
            source = slice(half * inner + band.start, half * inner + band.stop)
            rows = slice(half * size, (half + 1) * size)
            yield (
                f"{self.name}.{self._names[0]}",
                WeightTarget(self.gate_up, shape, (experts, source, outer), (experts, rows, outer)),
            )
        shape = (self.num_experts, self.hidden_size, inner)
        yield (
            f"{self.name}.{self._names[1]}",
            WeightTarget(self.down, shape, (experts, outer, band), (experts, outer, slice(0, size))),
        )

    def prepare_weights(self) -> None:
        """Converts the loaded experts to the op provider's form."""
        if self._op.prepare is not None:
            prepared = self._op.prepare((self.gate_up.data, self.down.data))
            del self.gate_up, self.down
            self.gate_up, self.down = prepared

"""Mixture of experts: a router picks a few gated MLPs for each token.

Tensor parallelism cuts every expert along its inner size, so that ranks stay equally loaded whatever the router picks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from mvllm.layers.context import BuildContext
from mvllm.layers.linear import ReplicatedLinear, share
from mvllm.layers.weight_target import WeightTarget


class MoE(nn.Module):
    """Router and experts (gated by silu).

    Args:
        ctx: Build context.
        router: The checkpoint module of the router.
        experts: The checkpoint module whose children `0`, `1`, ... are the experts.
        hidden_size, intermediate_size: Outer and inner size of one expert.
        num_experts, top_k: Experts in all, and per token.
        normalize: The weights of the chosen experts are scaled to sum to one.
        names: Checkpoint names of gate, up and down within an expert.

    Attributes:
        gate_up: [num_experts, 2 · size, hidden_size], size being this rank's share of the inner size; or what the op
            provider's `prepare` made of it after loading.
        down: [num_experts, hidden_size, size], likewise.
    """

    gate_up: Any
    down: Any

    def __init__(
        self,
        ctx: BuildContext,
        router: str,
        experts: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        top_k: int,
        normalize: bool = True,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        super().__init__()
        self.router = ReplicatedLinear(ctx, router, hidden_size, num_experts, bias=False)
        self.experts, self.names, self.top_k, self.normalize = experts, names, top_k, normalize
        self.intermediate_size = intermediate_size
        self.band = share(intermediate_size, ctx.tp, f"inner elements of {experts}")
        size = self.band.stop - self.band.start
        self.gate_up = ctx.parameter(num_experts, 2 * size, hidden_size)
        self.down = ctx.parameter(num_experts, hidden_size, size)
        self._tp = ctx.tp
        self._op = ctx.op("moe", num_experts=num_experts, top_k=top_k, hidden_size=hidden_size, intermediate_size=size)
        self._moe = self._op.function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] to [T, hidden_size]."""
        chances = torch.softmax(self.router(x), dim=-1, dtype=torch.float32)
        weights, ids = torch.topk(chances, self.top_k, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return self._tp.all_reduce(self._moe(x, self.gate_up, self.down, ids, weights))

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Checkpoint tensor names and what this rank takes of them. Before `prepare_weights` only."""
        num_experts, hidden_size, size = self.down.shape
        gate, up, down = self.names
        columns = slice(0, hidden_size)
        full = (self.intermediate_size, hidden_size)
        for e in range(num_experts):
            for name, start in ((gate, 0), (up, size)):
                rows = slice(start, start + size)
                yield (
                    f"{self.experts}.{e}.{name}.weight",
                    WeightTarget(self.gate_up, full, (self.band, columns), (e, rows, columns)),
                )
            yield (
                f"{self.experts}.{e}.{down}.weight",
                WeightTarget(
                    self.down,
                    full[::-1],
                    (columns, self.band),
                    (e, columns, slice(0, size)),
                ),
            )

    def prepare_weights(self) -> None:
        """Turns the loaded experts into the form that the op provider wants."""
        if self._op.prepare is not None:
            prepared = self._op.prepare((self.gate_up.data, self.down.data))
            del self.gate_up, self.down
            self.gate_up, self.down = prepared

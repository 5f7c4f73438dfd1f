"""Feed-forward blocks (MLP) of decoder layers, with tensor parallelism."""

from __future__ import annotations

import torch
from torch import nn

from mvllm.layers.activation import ACTIVATIONS, Activation, activation, gated_activation
from mvllm.layers.context import BuildContext
from mvllm.layers.linear import ColumnParallelLinear, RowParallelLinear


class GatedMLP(nn.Module):
    """Gated feed-forward block: down(f(gate(x)) * up(x)), with gate and up in one matrix product.

    Args:
        ctx: Build context.
        name: The checkpoint module that holds gate_proj, up_proj and down_proj.
        hidden_size, intermediate_size: Outer and inner size, before tensor-parallel sharding.
        hidden_act: The activation f, by its name in checkpoints.
        bias: Whether the three layers have biases.
        fused: The checkpoint stores gate and up as one matrix, gate_up_proj.
    """

    def __init__(
        self,
        ctx: BuildContext,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        *,
        bias: bool,
        fused: bool = False,
    ) -> None:
        super().__init__()
        names = ("gate_up_proj", "gate_up_proj") if fused else ("gate_proj", "up_proj")
        weights = [(f"{name}.{weight}", intermediate_size) for weight in names]
        self.gate_up = ColumnParallelLinear(ctx, weights, hidden_size, bias=bias)
        self.down = RowParallelLinear(ctx, f"{name}.down_proj", intermediate_size, hidden_size, bias=bias)
        self._num_devices = ctx.num_devices
        size = self.gate_up.out_features // 2 // ctx.num_devices
        self._act: Activation | None = gated_activation(ctx, hidden_act, size)
        if ACTIVATIONS[hidden_act] == "silu" and self.gate_up.fuse_silu_and_mul(ctx):
            self._act = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] to [T, hidden_size]."""
        gated = self.gate_up(x)
        if self._act is None:
            return self.down(gated)
        if self._num_devices > 1:  # each device has its gate columns, then its up columns
            return self.down(self._act(gated.unflatten(-1, (self._num_devices, -1))).flatten(-2))
        return self.down(self._act(gated))


class MLP(nn.Module):
    """Feed-forward block without a gate: down(f(up(x))).

    Args:
        ctx: Build context.
        up, down: The checkpoint modules.
        hidden_size, intermediate_size: Outer and inner size, before tensor-parallel sharding.
        act: The activation f, by its name in checkpoints.
        bias: Whether both layers have biases.
        transposed: The checkpoint stores matrices as [in, out].
    """

    def __init__(
        self,
        ctx: BuildContext,
        up: str,
        down: str,
        hidden_size: int,
        intermediate_size: int,
        act: str,
        *,
        bias: bool,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(ctx, [(up, intermediate_size)], hidden_size, bias=bias, transposed=transposed)
        self.down = RowParallelLinear(ctx, down, intermediate_size, hidden_size, bias=bias, transposed=transposed)
        self._act = activation(ctx, act, self.up.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] to [T, hidden_size]."""
        return self.down(self._act(self.up(x)))

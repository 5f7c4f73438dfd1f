"""CausalConv1d, the short convolution of layers with a sequence state, and ShortConv, LFM2's layer made of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.layers.linear import ColumnParallelLinear, RowParallelLinear, shard_slice
from mvllm.layers.matrix_layout import Part
from mvllm.layers.rotary import CosSinRows
from mvllm.layers.state import SequenceState, StateStep
from mvllm.layers.weight_target import WeightTarget
from mvllm.platform.state import StateTensor


class CausalConv1d(nn.Module):
    """A causal convolution over the tokens of each sequence, with one filter per channel.

    Args:
        ctx: Build context.
        parts: This rank's channels of the checkpoint modules, each [channels, 1, kernel_size].
        kernel_size: Tokens that one result depends on.
        bias: Whether there are biases.
        activation: As in the operation `causal_conv1d`.

    Attributes:
        weight: [channels, 1, kernel_size].
        bias: [channels] or None.
        state_tensor: The state of one sequence: its last kernel_size - 1 inputs.
    """

    def __init__(
        self, ctx: BuildContext, parts: Sequence[Part], kernel_size: int, *, bias: bool, activation: str
    ) -> None:
        super().__init__()
        self._parts, self._activation = parts, activation
        channels = max(part.destination.stop for part in parts)
        self.weight = ctx.parameter(channels, 1, kernel_size)
        self.bias = ctx.parameter(channels) if bias else None
        self.state_tensor = StateTensor((channels, kernel_size - 1), ctx.dtype_name)
        self._conv = ctx.op("causal_conv1d", channels=channels, kernel_size=kernel_size).function

    def forward(self, x: torch.Tensor, state: torch.Tensor, step: StateStep) -> torch.Tensor:
        """[T, channels] to [T, channels]. `state` [num_slots + 1, channels, kernel_size - 1] is updated."""
        return self._conv(x, self.weight.squeeze(1), self.bias, state, *step, self._activation)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Checkpoint tensor names and their targets on this rank."""
        _, one, kernel_size = self.weight.shape
        filters = slice(0, one), slice(0, kernel_size)
        for part in self._parts:
            shape = part.num_rows, one, kernel_size
            source, destination = (part.source, *filters), (part.destination, *filters)
            yield f"{part.name}.weight", WeightTarget(self.weight, shape, source, destination)
            if self.bias is not None:
                rows = (part.source,), (part.destination,)
                yield f"{part.name}.bias", WeightTarget(self.bias, (part.num_rows,), *rows)


class ShortConv(nn.Module):
    """LFM2's gated short convolution: out(c * conv(b * x)), where b, c and x are projections of the input.

    Tensor parallelism divides the channels.

    Args:
        ctx: Build context.
        name: The checkpoint module that holds in_proj, conv and out_proj.
        hidden_size: Channels of the whole model.
        kernel_size: Tokens that one result of the convolution depends on.
        bias: Whether all three have biases.

    Attributes:
        cache: The last inputs of the convolution.

    Raises:
        ConfigError: The channels do not divide evenly over the ranks.
    """

    def __init__(self, ctx: BuildContext, name: str, hidden_size: int, kernel_size: int, *, bias: bool) -> None:
        super().__init__()
        channels = shard_slice(hidden_size, ctx.shares, f"channels of {name}")
        bands = [(f"{name}.in_proj", hidden_size)] * 3
        self.in_proj = ColumnParallelLinear(ctx, bands, hidden_size, bias=bias)
        part = Part(f"{name}.conv", hidden_size, channels, slice(0, channels.stop - channels.start))
        self.conv = CausalConv1d(ctx, [part], kernel_size, bias=bias, activation="none")
        self.output = RowParallelLinear(ctx, f"{name}.out_proj", hidden_size, hidden_size, bias=bias)
        self.cache = SequenceState(ctx, (self.conv.state_tensor,))

    def forward(self, x: torch.Tensor, angles: CosSinRows, step: ForwardStep) -> torch.Tensor:
        """[T, hidden_size] to [T, hidden_size]; updates the step's states. `angles` are not used."""
        (state,) = self.cache.state
        b, c, x = self.in_proj(x).chunk(3, dim=-1)
        x = self.cache.in_passes(b * x, step)
        y = self.cache.run(lambda slots, x: self.conv(x, state, slots), step, x)
        return self.output(c * self.cache.in_step(y, step))

"""Mamba2Mixer: a Mamba-2 layer, a short convolution and a state-space recurrence (SSD) over heads.

    input ─ in_proj ─┬─ gate ──────────────────────────────────────────┐
                     ├─ x, B, C ── causal_conv1d ─┬─ x ─┐              │
                     │                            ├─ B ─┼─ ssd ─ gated norm ─ out_proj ─> result
                     │                            └─ C ─┤
                     └─ dt ─────────────────────────────┘

The state of a sequence is the last inputs of the convolution, and one matrix [head_size, state_size] per head. The
heads of one group have B and C in common.

Tensor parallelism shards gate, x and dt by heads, and B and C by groups. With fewer groups than ranks, adjacent ranks
hold copies of one group:

    8 heads, 2 groups, 4 ranks    rank       0     1     2     3
                                  heads     0 1   2 3   4 5   6 7
                                  group      0     0     1     1

Source: Mamba-2, arXiv:2405.21060.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from mvllm.errors import ConfigError, ModelError
from mvllm.layers.activation import ACTIVATIONS, activation
from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.layers.linear import Linear, RowParallelLinear, shard_slice
from mvllm.layers.matrix_layout import Part
from mvllm.layers.rotary import CosSinRows
from mvllm.layers.short_conv import CausalConv1d
from mvllm.layers.state import SequenceState, StateStep
from mvllm.layers.weight_target import WeightTarget
from mvllm.platform.state import StateTensor


@dataclass(frozen=True)
class Mamba2Config:
    """Sizes and options of a Mamba-2 layer, of the whole model.

    Attributes:
        hidden_size: Elements of inputs and results.
        num_heads, head_size: Heads of x, and elements per head.
        num_groups: Groups of B and C; divides `num_heads`.
        state_size: Elements of B and C per group.
        conv_kernel: Tokens that one output of the convolution reads.
        conv_bias, in_bias, out_bias: Whether the convolution and the two projections have biases.
        activation: The activation of the convolution by its name in checkpoints; 'silu'. That of the gate is silu.
        norm: Whether the result of the recurrence is normalised; if not, it is only multiplied by the gate.
        norm_groups: Parts of the inner size that are normalised alone; None for `num_groups`.
        norm_before_gate: The result is normalised before it is multiplied by the gate, not afterwards.
        eps: Added to the mean square.
        dt_limit: Smallest and largest time step.
        multipliers: Factors on gate, x, B, C and dt after the projection; empty for none.
    """

    hidden_size: int
    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    conv_kernel: int = 4
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    activation: str = "silu"
    norm: bool = True
    norm_groups: int | None = None
    norm_before_gate: bool = False
    eps: float = 1e-5
    dt_limit: tuple[float, float] = (0.0, math.inf)
    multipliers: tuple[float, ...] = ()

    @property
    def inner_size(self) -> int:
        """Elements of the gate and of x."""
        return self.num_heads * self.head_size


@dataclass(frozen=True)
class Mamba2Shard:
    """The heads and groups of one rank.

    Attributes:
        heads: Range of its heads.
        groups: Range of its groups of B and C, copies included.
    """

    heads: slice
    groups: slice

    @classmethod
    def of(cls, config: Mamba2Config, ctx: BuildContext, name: str) -> Mamba2Shard:
        """The shard of this rank of the layer `name`.

        Raises:
            ConfigError: The heads or groups do not divide evenly.
        """
        num_ranks = ctx.tp.world_size
        if config.num_heads % config.num_groups:
            raise ConfigError(
                f"{name}: {config.num_heads} Mamba heads do not form {config.num_groups} equal groups. Correct "
                "config.json."
            )
        heads = shard_slice(config.num_heads, ctx.shares, f"Mamba heads of {name}")
        if config.num_groups % num_ranks == 0:
            return cls(heads, shard_slice(config.num_groups, ctx.shares, f"Mamba groups of {name}"))
        if num_ranks % config.num_groups:
            raise ConfigError(
                f"{name}: tensor_parallel_size={num_ranks} neither divides the {config.num_groups} groups of Mamba "
                "heads nor is a multiple of them. Choose a tensor_parallel_size that does."
            )
        group = ctx.tp.rank_in_group * config.num_groups // num_ranks
        return cls(heads, slice(group, group + 1))

    @property
    def num_heads(self) -> int:
        """Number of heads."""
        return int(self.heads.stop - self.heads.start)

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return int(self.groups.stop - self.groups.start)


class Mamba2Mixer(nn.Module):
    """A Mamba-2 layer over this rank's heads.

    Args:
        ctx: Build context.
        name: The checkpoint module.
        config: Sizes and options.

    Attributes:
        config: As given.
        cache: The state of the layer: inputs of the convolution [channels, conv_kernel - 1] in the compute dtype, and
            the matrices [heads, head_size, state_size] in float32.

    Raises:
        ConfigError: The heads or groups do not divide evenly among the ranks.
        ModelError: The activation is not supported.
    """

    def __init__(self, ctx: BuildContext, name: str, config: Mamba2Config) -> None:
        super().__init__()
        self.config = config
        shard = Mamba2Shard.of(config, ctx, name)
        self._heads, self._groups = shard.num_heads, shard.num_groups
        inner, group_width = self._heads * config.head_size, self._groups * config.state_size
        x = _Rows(config.num_heads, config.head_size, shard.heads)
        b_or_c = _Rows(config.num_groups, config.state_size, shard.groups)
        dt = _Rows(config.num_heads, 1, shard.heads)
        self._sizes = (inner, inner + 2 * group_width, self._heads)
        self._conv_sizes = (inner, group_width, group_width)
        self.in_proj = Linear(
            ctx,
            [Part(f"{name}.in_proj", *rows) for rows in _stack(x, x, b_or_c, b_or_c, dt)],
            config.hidden_size,
            bias=config.in_bias,
        )
        if ACTIVATIONS.get(config.activation) != "silu":
            raise ModelError(
                f"{name}: the activation of a Mamba layer is {config.activation!r}, but only 'silu' is supported."
            )
        parts = [Part(f"{name}.conv1d", *rows) for rows in _stack(x, b_or_c, b_or_c)]
        self.conv = CausalConv1d(ctx, parts, config.conv_kernel, bias=config.conv_bias, activation="silu")
        self.heads = SSDHeads(ctx, name, config, shard.heads)
        self.norm = GatedNorm(ctx, f"{name}.norm", config, shard.heads) if config.norm else None
        self.out_proj = RowParallelLinear(
            ctx, f"{name}.out_proj", config.inner_size, config.hidden_size, bias=config.out_bias
        )
        facts = {"num_heads": self._heads, "num_groups": self._groups, "state_size": config.state_size}
        self._ssd = ctx.op("ssd", head_dim=config.head_size, **facts).function
        self._silu = activation(ctx, "silu", inner)
        self._scales: torch.Tensor | None = None
        if any(factor != 1.0 for factor in config.multipliers):
            counts = torch.tensor([inner, *self._conv_sizes, self._heads])
            factors = torch.tensor(config.multipliers, dtype=ctx.dtype).repeat_interleave(counts)
            self._scales = factors.to(ctx.device)
        self.cache = SequenceState(
            ctx,
            (
                self.conv.state_tensor,
                StateTensor((self._heads, config.head_size, config.state_size), "float32"),
            ),
        )

    def forward(self, x: torch.Tensor, angles: CosSinRows | None, step: ForwardStep) -> torch.Tensor:
        """[T, hidden_size] to [T, hidden_size]; updates the step's states. `angles` are not used."""
        cache = self.cache
        conv_state, ssm_state = cache.state
        projected = self.in_proj(x)
        if self._scales is not None:
            projected = projected * self._scales
        gate = projected.split(self._sizes, dim=-1)[0]
        _, xbc, dt = cache.in_passes(projected, step).split(self._sizes, dim=-1)
        xbc = cache.run(lambda slots, xbc: self.conv(xbc, conv_state, slots), step, xbc)

        def advance(slots: StateStep, xbc: torch.Tensor, dt: torch.Tensor) -> torch.Tensor:
            values, b, c = xbc.split(self._conv_sizes, dim=-1)
            return self._ssd(
                values.unflatten(-1, (self._heads, -1)),
                dt,
                self.heads.a,
                b.unflatten(-1, (self._groups, -1)),
                c.unflatten(-1, (self._groups, -1)),
                self.heads.d,
                self.heads.dt_bias,
                ssm_state,
                *slots,
                *self.config.dt_limit,
            )

        y = cache.in_step(cache.run(advance, step, xbc, dt), step).flatten(1)
        return self.out_proj(y * self._silu(gate) if self.norm is None else self.norm(y, gate))


class SSDHeads(nn.Module):
    """The parameters of the recurrence: one number per head each, in float32.

    Args:
        ctx: Build context.
        name: The checkpoint module that holds A_log, D and dt_bias.
        config: Sizes.
        heads: This rank's heads.

    Attributes:
        a: [heads on this rank]: decay rates, negative; until `prepare_weights` the checkpoint's A_log.
        d: [heads on this rank]: factor of the input that is added to the result.
        dt_bias: [heads on this rank]: added to the time step before the softplus.
    """

    def __init__(self, ctx: BuildContext, name: str, config: Mamba2Config, heads: slice) -> None:
        super().__init__()
        self.name, self._num_heads, self._heads = name, config.num_heads, heads
        floats, size = ctx.floats(torch.float32), heads.stop - heads.start
        self.a, self.d, self.dt_bias = (floats.parameter(size) for _ in range(3))

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Checkpoint tensor names and their targets on this rank."""
        for name, parameter in (("A_log", self.a), ("D", self.d), ("dt_bias", self.dt_bias)):
            everything = slice(0, len(parameter))
            yield f"{self.name}.{name}", WeightTarget(parameter, (self._num_heads,), (self._heads,), (everything,))

    def prepare_weights(self) -> None:
        """Computes the decay rates, once, after loading."""
        self.a.copy_(-self.a.exp())


class GatedNorm(nn.Module):
    """RMS norm of each part of the inner size, times silu of a gate before or after it.

    Where one part spans several ranks, the ranks add up its squares.

    Args:
        ctx: Build context.
        name: The checkpoint module.
        config: Sizes and options.
        heads: This rank's heads.

    Attributes:
        weight: [inner elements on this rank].

    Raises:
        ConfigError: The parts do not divide evenly among the ranks.
    """

    def __init__(self, ctx: BuildContext, name: str, config: Mamba2Config, heads: slice) -> None:
        super().__init__()
        self.name, self.config = name, config
        num_parts, num_ranks = config.norm_groups or config.num_groups, ctx.tp.world_size
        self._elements = slice(heads.start * config.head_size, heads.stop * config.head_size)
        size = self._elements.stop - self._elements.start
        self._part_size = config.inner_size // num_parts
        if config.inner_size % num_parts or (num_parts % num_ranks and num_ranks % num_parts):
            raise ConfigError(
                f"{name}: {num_parts} normalised parts of {config.inner_size} elements cannot be shared evenly by "
                f"{num_ranks} ranks. Choose a tensor_parallel_size that divides them or is a multiple of them."
            )
        self.weight = ctx.parameter(size)
        self._silu = activation(ctx.floats(torch.float32), "silu", size)
        self._tp = ctx.tp
        self._is_own: torch.Tensor | None = None
        self._part = None if num_parts % num_ranks == 0 else ctx.tp.rank_in_group * num_parts // num_ranks
        if self._part is not None:
            self._is_own = torch.arange(num_parts, device=ctx.device) == self._part
        group_size = self._part_size if self._part is None else size
        facts = {"norm_before_gate": config.norm_before_gate, "activation": "silu"}
        self._norm = ctx.op("gated_rms_norm", width=size, group_size=group_size, **facts).function

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """[T, inner on this rank] and its gate to [T, inner on this rank]."""
        before, eps = self.config.norm_before_gate, self.config.eps
        if self._part is None:
            return self._norm(x, gate, self.weight, eps, self._part_size, before, "silu")
        wide, factor = x.float(), self._silu(gate.float())
        wide = wide if before else wide * factor
        assert self._is_own is not None
        sums = torch.where(self._is_own, wide.square().sum(-1, keepdim=True), 0.0)  # in the column of this rank's part
        mean_square = self._tp.all_reduce(sums)[:, self._part, None] / self._part_size
        normed = wide * torch.rsqrt(mean_square + eps) * self.weight.float()
        return (normed * factor if before else normed).to(x.dtype)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """The checkpoint tensor and its target on this rank."""
        everything = slice(0, len(self.weight))
        target = WeightTarget(self.weight, (self.config.inner_size,), (self._elements,), (everything,))
        yield f"{self.name}.weight", target


_Place = tuple[int, slice, slice]
"""Rows of a whole checkpoint matrix, the range of those read, and the range that they fill."""


@dataclass(frozen=True)
class _Rows:
    """One of the matrices that a checkpoint stacks: `count` heads or groups of `size` rows, and this rank's range."""

    count: int
    size: int
    mine: slice


def _stack(*bands: _Rows) -> Iterator[_Place]:
    """This rank's rows of each band of one stacked checkpoint matrix."""
    num_rows = sum(band.count * band.size for band in bands)
    offset = destination = 0
    for band in bands:
        start, stop = band.mine.start * band.size, band.mine.stop * band.size
        yield num_rows, slice(offset + start, offset + stop), slice(destination, destination + stop - start)
        offset += band.count * band.size
        destination += stop - start

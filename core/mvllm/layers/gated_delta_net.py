"""Gated DeltaNet: linear attention whose state is corrected towards each token's value, with a learned decay.

    x ─┬─ q, k, v ── causal convolution, silu ── gated delta rule ── norm · silu(z) ── out
       ├─ z (gate of the result)                       │
       ├─ b: share of the correction, sigmoid(b) ──────┤
       └─ a: decay, exp(-exp(A_log) · softplus(a + dt_bias)) of the state per token and value head

Each key head serves a group of value heads. Tensor parallelism divides the key heads, with their value heads.

Families store the same six projections in different checkpoint matrices (DeltaNetNames). On a rank they form two
matrices, [q | k | v | z] and [b | a], whatever the order in the checkpoint.

Source: Gated Delta Networks, arXiv:2412.06464.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from mvllm.errors import ModelError
from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.layers.linear import Linear, RowParallelLinear, shard_slice
from mvllm.layers.matrix_layout import Part
from mvllm.layers.rotary import CosSinRows
from mvllm.layers.short_conv import CausalConv1d
from mvllm.layers.state import SequenceState, StateStep
from mvllm.layers.weight_target import WeightTarget, whole_tensor_target
from mvllm.platform.state import StateTensor


@dataclass(frozen=True)
class DeltaNetNames:
    """Checkpoint modules of a layer, relative to it.

    Attributes:
        projections: Modules of the projections, each with the letters of those that it stacks. Among them are the
            letters q, k, v, z, b and a once each.
        by_group: Modules that stack several projections store them group by group: for each key head its rows of the
            first projection, of the second, and so on. Otherwise all rows of the first, then all rows of the second.
        conv: Modules of the convolution, likewise (q, k and v), never by group.
        norm, output: Modules of the norm and of the output projection.
    """

    projections: Mapping[str, str]
    by_group: bool = False
    conv: Mapping[str, str] = field(default_factory=lambda: {"conv1d": "qkv"})
    norm: str = "norm"
    output: str = "out_proj"


@dataclass(frozen=True)
class DeltaNetConfig:
    """Sizes of the whole model's layers.

    Attributes:
        hidden_size: Size of inputs and results.
        num_key_heads, num_value_heads: Heads of q and k, and heads of v; the second is a multiple of the first.
        key_head_dim, value_head_dim: Elements per head.
        conv_kernel_size: Tokens that one result of the convolution depends on.
        eps: Epsilon of the norm.
        beta_scale: Factor of the share of the correction. 2 permits negative eigenvalues of the transition.
    """

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_size: int
    eps: float
    beta_scale: float = 1.0

    def rows_of(self, projection: str) -> int:
        """Rows of a projection, by its letter, for each key head."""
        values = self.num_value_heads // self.num_key_heads
        if projection in "qk":
            return self.key_head_dim
        return values * self.value_head_dim if projection in "vz" else values


class GatedDeltaNet(nn.Module):
    """A gated delta net over this rank's heads.

    Args:
        ctx: Build context.
        name: The checkpoint module.
        config: Its sizes.
        names: Its checkpoint modules.

    Attributes:
        decay: [value heads on this rank], float32: -exp(A_log); until `prepare_weights` A_log.
        dt_bias: [value heads on this rank], float32.
        norm_weight: [value_head_dim], of the norm that each head shares.
        cache: The last inputs of the convolution, and the state [value heads, key_head_dim, value_head_dim].

    Raises:
        ConfigError: The key heads do not divide evenly over the ranks.
        ModelError: The value heads do not divide evenly over the key heads.
    """

    def __init__(self, ctx: BuildContext, name: str, config: DeltaNetConfig, names: DeltaNetNames) -> None:
        super().__init__()
        if config.num_value_heads % config.num_key_heads:
            raise ModelError(
                f"The model's config.json is wrong: {config.num_value_heads} value heads of {name} do not form equal "
                f"groups for {config.num_key_heads} key heads."
            )
        heads = shard_slice(config.num_key_heads, ctx.shares, f"key heads of {name}")
        self.name, self._names, self.config = name, names, config
        num_key_heads, per_key_head = heads.stop - heads.start, config.num_value_heads // config.num_key_heads
        num_value_heads = num_key_heads * per_key_head
        self._values = slice(heads.start * per_key_head, heads.stop * per_key_head)

        def parts(modules: Mapping[str, str], wanted: str, *, by_group: bool = False) -> list[Part]:
            named = {f"{name}.{module}": letters for module, letters in modules.items()}
            return _parts(config, named, wanted, heads, by_group=by_group)

        def linear(wanted: str) -> Linear:
            rows = parts(names.projections, wanted, by_group=names.by_group)
            return Linear(ctx, rows, config.hidden_size, bias=False)

        self.qkvz, self.ba = linear("qkvz"), linear("ba")
        kernel_size = config.conv_kernel_size
        self.conv = CausalConv1d(ctx, parts(names.conv, "qkv"), kernel_size, bias=False, activation="silu")
        floats = ctx.floats(torch.float32)
        self.decay, self.dt_bias = floats.parameter(num_value_heads), floats.parameter(num_value_heads)
        self.norm_weight = ctx.parameter(config.value_head_dim)
        self.output = RowParallelLinear(
            ctx,
            f"{name}.{names.output}",
            config.num_value_heads * config.value_head_dim,
            config.hidden_size,
            bias=False,
        )
        state = StateTensor((num_value_heads, config.key_head_dim, config.value_head_dim), "float32")
        self.cache = SequenceState(ctx, (self.conv.state_tensor, state))
        self._rows = [num_key_heads * config.rows_of(projection) for projection in "qkvz"]
        self._num_key_heads, self._num_value_heads = num_key_heads, num_value_heads
        self._scale = config.key_head_dim**-0.5
        self._sigmoid = ctx.op("sigmoid", size=num_value_heads).function
        self._log_decay = ctx.op("log_decay", num_heads=num_value_heads, width=num_value_heads).function
        self._delta_rule = ctx.op(
            "gated_delta_rule",
            num_k_heads=num_key_heads,
            num_v_heads=num_value_heads,
            k_head_dim=config.key_head_dim,
            v_head_dim=config.value_head_dim,
        ).function
        size = config.value_head_dim
        facts = {"width": size, "group_size": size, "norm_before_gate": True, "activation": "silu"}
        self._norm = ctx.op("gated_rms_norm", **facts).function

    def forward(self, x: torch.Tensor, angles: CosSinRows, step: ForwardStep) -> torch.Tensor:
        """[T, hidden_size] to [T, hidden_size]; updates the step's states. `angles` are not used."""
        config, cache = self.config, self.cache
        conv_state, state = cache.state
        qkvz, parts = self.qkvz(x), (sum(self._rows[:3]), self._rows[3])
        qkv, z = cache.in_passes(qkvz, step).split(parts, dim=-1)[0], qkvz.split(parts, dim=-1)[1]
        b, a = cache.in_passes(self.ba(x), step).chunk(2, dim=-1)
        qkv = cache.run(lambda slots, qkv: self.conv(qkv, conv_state, slots), step, qkv)
        beta = self._sigmoid(b)
        if config.beta_scale != 1.0:
            beta = beta * config.beta_scale

        def advance(slots: StateStep, qkv: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
            q, k, v = qkv.split(self._rows[:3], dim=-1)
            return self._delta_rule(
                q.unflatten(-1, (self._num_key_heads, -1)),
                k.unflatten(-1, (self._num_key_heads, -1)),
                v.unflatten(-1, (self._num_value_heads, -1)),
                g,
                beta,
                state,
                *slots,
                self._scale,
                True,
            )

        y = cache.in_step(cache.run(advance, step, qkv, self._log_decay(a, self.decay, self.dt_bias), beta), step)
        gate, size = z.unflatten(-1, (self._num_value_heads, -1)), config.value_head_dim
        return self.output(self._norm(y, gate, self.norm_weight, config.eps, size, True, "silu").flatten(1))

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Targets of A_log, dt_bias and the norm; the other modules have their own."""
        yield whole_tensor_target(f"{self.name}.{self._names.norm}.weight", self.norm_weight)
        shape, whole = (self.config.num_value_heads,), slice(0, self._num_value_heads)
        for name, parameter in (("A_log", self.decay), ("dt_bias", self.dt_bias)):
            yield f"{self.name}.{name}", WeightTarget(parameter, shape, (self._values,), (whole,))

    def prepare_weights(self) -> None:
        """Computes the decay from A_log once, after loading."""
        self.decay.exp_().neg_()


def _parts(
    config: DeltaNetConfig, modules: Mapping[str, str], wanted: str, heads: slice, *, by_group: bool
) -> list[Part]:
    """The rows of the key heads `heads` of the projections `wanted`, one projection after the other.

    2 key heads, one matrix of q and k, this rank has head 1:

        whole      q0 q1 k0 k1          by group     q0 k0 q1 k1
        parts         q1    k1                             q1 k1

    Args:
        config: Sizes.
        modules: Checkpoint modules, each with the letters of the projections that it stacks.
        wanted: Letters of the projections.
        heads: This rank's key heads.
        by_group: As in DeltaNetNames.
    """
    num_heads, count = config.num_key_heads, heads.stop - heads.start
    places: dict[str, tuple[str, str]] = {
        projection: (module, stacked) for module, stacked in modules.items() for projection in stacked
    }
    parts: list[Part] = []
    destination = 0
    for projection in wanted:
        module, stacked = places[projection]
        in_group, rows = sum(map(config.rows_of, stacked)), config.rows_of(projection)
        before = sum(map(config.rows_of, stacked[: stacked.index(projection)]))
        if by_group:
            starts, size = [head * in_group + before for head in range(heads.start, heads.stop)], rows
        else:
            starts, size = [num_heads * before + heads.start * rows], count * rows
        for start in starts:
            source, place = slice(start, start + size), slice(destination, destination + size)
            parts.append(Part(module, num_heads * in_group, source, place))
            destination += size
    return parts

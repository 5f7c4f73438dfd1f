"""Kimi Delta Attention (KDA): a gated delta net whose state decays by a number of its own per key channel.

    x ─┬─ q, k, v ─ causal convolution, silu ─ delta rule ─ norm · sigmoid(gate) ─ out
       ├─ b: share of the correction, sigmoid(b) ───┤                   │
       ├─ f_a, f_b: decay per channel ──────────────┘                   │
       └─ g_a, g_b: gate of the result ─────────────────────────────────┘

The decay is exp(-exp(A_log) · softplus(f + dt_bias)). f and the gate are products of two matrices of low rank: the
first of each is replicated, the second is divided over the ranks by heads, as are the other projections.

Source: Kimi Linear, arXiv:2510.26692.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.layers.linear import ColumnParallelLinear, Linear, RowParallelLinear, shard_slice
from mvllm.layers.matrix_layout import Part
from mvllm.layers.rotary import CosSinRows
from mvllm.layers.short_conv import CausalConv1d
from mvllm.layers.state import SequenceState, StateStep
from mvllm.layers.weight_target import WeightTarget, whole_tensor_target
from mvllm.platform.state import StateTensor


@dataclass(frozen=True)
class KimiDeltaConfig:
    """Sizes of the whole model's layers.

    Attributes:
        hidden_size: Size of inputs and results.
        num_heads, head_dim: Heads, and elements of a query, key or value; also the rank of decay and gate.
        conv_kernel_size: Tokens that one result of the convolution depends on.
        eps: Epsilon of the norm.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    conv_kernel_size: int
    eps: float


class KimiDeltaAttention(nn.Module):
    """Kimi Delta Attention over this rank's heads.

    Args:
        ctx: Build context.
        name: The checkpoint module.
        config: Its sizes.

    Attributes:
        decay: [1, 1, heads on this rank, 1], float32: -exp(A_log); until `prepare_weights` A_log.
        dt_bias: [heads on this rank · head_dim], float32.
        norm_weight: [head_dim], of the norm that each head shares.
        cache: The last inputs of the convolution, and the state [heads, head_dim, head_dim].

    Raises:
        ConfigError: The heads do not divide evenly over the ranks.
    """

    def __init__(self, ctx: BuildContext, name: str, config: KimiDeltaConfig) -> None:
        super().__init__()
        heads = shard_slice(config.num_heads, ctx.shares, f"heads of {name}")
        self.name, self.config, self._heads = name, config, heads
        self._num_heads = num_heads = heads.stop - heads.start
        hidden_size, size, head_dim = config.hidden_size, config.num_heads * config.head_dim, config.head_dim
        self.qkv = ColumnParallelLinear(ctx, [(f"{name}.{x}_proj", size) for x in "qkv"], hidden_size, bias=False)
        self.b = ColumnParallelLinear(ctx, [(f"{name}.b_proj", config.num_heads)], hidden_size, bias=False)
        whole = slice(0, head_dim)
        low_rank = [
            Part(f"{name}.{x}_a_proj", head_dim, whole, slice(i * head_dim, (i + 1) * head_dim))
            for i, x in enumerate("fg")
        ]
        self.fg_a = Linear(ctx, low_rank, hidden_size, bias=False)
        self.f_b = ColumnParallelLinear(ctx, [(f"{name}.f_b_proj", size)], head_dim, bias=False)
        self.g_b = ColumnParallelLinear(ctx, [(f"{name}.g_b_proj", size)], head_dim, bias=False)
        self._channels = slice(heads.start * head_dim, heads.stop * head_dim)
        self._width = width = num_heads * head_dim
        filters = [
            Part(f"{name}.{x}_conv1d", size, self._channels, slice(i * width, (i + 1) * width))
            for i, x in enumerate("qkv")
        ]
        self.conv = CausalConv1d(ctx, filters, config.conv_kernel_size, bias=False, activation="silu")
        floats = ctx.floats(torch.float32)
        self.decay, self.dt_bias = floats.parameter(1, 1, num_heads, 1), floats.parameter(width)
        self.norm_weight = ctx.parameter(head_dim)
        self.output = RowParallelLinear(ctx, f"{name}.o_proj", size, hidden_size, bias=False)
        state = StateTensor((num_heads, head_dim, head_dim), "float32")
        self.cache = SequenceState(ctx, (self.conv.state_tensor, state))
        self._scale = head_dim**-0.5
        self._sigmoid = ctx.op("sigmoid", size=num_heads).function
        self._log_decay = ctx.op("log_decay", num_heads=num_heads, width=width).function
        self._kda = ctx.op("kda", num_heads=num_heads, k_head_dim=head_dim, v_head_dim=head_dim).function
        facts = {"width": head_dim, "group_size": head_dim, "norm_before_gate": True, "activation": "sigmoid"}
        self._norm = ctx.op("gated_rms_norm", **facts).function

    def forward(self, x: torch.Tensor, angles: CosSinRows, step: ForwardStep) -> torch.Tensor:
        """[T, hidden_size] to [T, hidden_size]; updates the step's states. `angles` are not used."""
        config, cache = self.config, self.cache
        conv_state, state = cache.state
        heads, size = (self._num_heads, config.head_dim), config.head_dim
        qkv = cache.in_passes(self.qkv(x), step)
        qkv = cache.run(lambda slots, qkv: self.conv(qkv, conv_state, slots), step, qkv)
        f, g = self.fg_a(x).chunk(2, dim=-1)
        decay = self._log_decay(cache.in_passes(self.f_b(f), step), self.decay.flatten(), self.dt_bias)
        beta = self._sigmoid(cache.in_passes(self.b(x), step))

        def advance(slots: StateStep, qkv: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
            q, k, v = (part.unflatten(-1, heads) for part in qkv.split(self._width, dim=-1))
            return self._kda(q, k, v, decay.unflatten(-1, heads), beta, state, *slots, self._scale, True)

        y = cache.in_step(cache.run(advance, step, qkv, decay, beta), step)
        gate = self.g_b(g).unflatten(-1, heads)
        return self.output(self._norm(y, gate, self.norm_weight, config.eps, size, True, "sigmoid").flatten(1))

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Targets of A_log, dt_bias and the norm; the other modules have their own."""
        yield whole_tensor_target(f"{self.name}.o_norm.weight", self.norm_weight)
        one, count = slice(0, 1), self._num_heads
        yield (
            f"{self.name}.A_log",
            WeightTarget(
                self.decay,
                (1, 1, self.config.num_heads, 1),
                (one, one, self._heads, one),
                (one, one, slice(0, count), one),
            ),
        )
        shape = (self.config.num_heads * self.config.head_dim,)
        yield f"{self.name}.dt_bias", WeightTarget(self.dt_bias, shape, (self._channels,), (slice(0, self._width),))

    def prepare_weights(self) -> None:
        """Computes the decay from A_log once, after loading."""
        self.decay.exp_().neg_()

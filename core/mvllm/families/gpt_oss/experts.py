"""GptOssExperts: experts with biases and clamped gates, stacked in one checkpoint tensor.

    gate_up_proj  [experts, hidden_size, 2 · size]    columns of gate and up alternate      (floats)
    down_proj     [experts, size, hidden_size]

Quantized experts (stacked_experts.py) stay quantized if the platform supports `quantized_moe`; otherwise they are
dequantized after loading, and online quantization does not change them.

Tensor parallelism shards every expert along its inner size, as in `fused_moe.py`. Only the first rank adds the biases
of results that are summed over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from mvllm.errors import ConfigError
from mvllm.layers.context import BuildContext
from mvllm.layers.linear import shard_slice
from mvllm.layers.quantization.block_quantization import BlockQuantization
from mvllm.layers.quantization.mxfp4 import MXFP4
from mvllm.layers.quantized_experts import prepared_experts, quantized_moe_op
from mvllm.layers.stacked_experts import ExpertStack, StackedMXFP4, quantized_stack
from mvllm.layers.weight_target import WeightTarget, whole_tensor_target


class GptOssExperts(nn.Module):
    """The experts of one layer.

    Args:
        ctx: Build context.
        name: The checkpoint module that holds all experts.
        hidden_size, intermediate_size: Outer and inner size of one expert.
        num_experts, top_k: Number of experts, and experts per token.
        alpha, limit: As in the operation `clamped_moe`.

    Attributes:
        gate_up, down: As in FusedMoE.
        gate_up_bias: [num_experts, 2 · size], gate first.
        down_bias: [num_experts, hidden_size]; zero on all ranks but the first.
        stays_quantized: As in FusedMoE.

    Raises:
        ConfigError: The checkpoint is quantized by a method that is not supported.
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
        alpha: float,
        limit: float,
    ) -> None:
        super().__init__()
        method = ctx.quantization
        if method is not None and not method.quantizes_on_load and not isinstance(method, MXFP4 | BlockQuantization):
            raise ConfigError(
                f"{name}: quantization {type(method).__name__} is not supported for the experts of this family, only "
                "floats, MXFP4 and GGUF files. Use the model's original checkpoint."
            )
        self.hidden_size, self.num_experts, self.alpha, self.limit = hidden_size, num_experts, alpha, limit
        band = shard_slice(intermediate_size, ctx.shares, f"inner elements of {name}")
        self._sizes = ExpertStack(name, num_experts, hidden_size, intermediate_size, band)
        size = self._sizes.size
        names = ("gate_up", "gate_up_bias", "down", "down_bias")
        self.partitions: Mapping[str, int] = {} if num_experts % ctx.num_devices else dict.fromkeys(names, 0)
        self._place = ctx.place
        self.gate_up_bias = ctx.parameter(num_experts, 2 * size)
        self.down_bias = ctx.parameter(num_experts, hidden_size)
        self._adds_bias = ctx.tp.is_first
        facts = {"num_experts": num_experts, "top_k": top_k, "hidden_size": hidden_size, "intermediate_size": size}
        floats, quantized = ctx.op("clamped_moe", **facts), None
        stack = quantized_stack(ctx, self._sizes)
        if stack is not None:
            of_stack = stack.gate_up_facts, stack.down_facts
            quantized = quantized_moe_op(ctx, *of_stack, floats=floats, facts=facts, clamped=True)
            if quantized is not None:
                stack.keep_quantized()
        self.stays_quantized = quantized is not None
        self._stack = stack if self.stays_quantized or isinstance(stack, StackedMXFP4) else None
        self._op = quantized or floats
        self._moe = self._op.function
        if self.stays_quantized:
            self.gate_up = self.down = None
            return
        gate_up, down = ctx.parameter(num_experts, 2 * size, hidden_size), ctx.parameter(num_experts, hidden_size, size)
        self.gate_up, self.down = gate_up, down
        if self._stack is not None:  # no checkpoint tensor fills these
            del self.gate_up, self.down
            self.gate_up, self.down = gate_up.data, down.data

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """As in FusedMoE."""
        up, down = (self.gate_up, self.gate_up_bias), (self.down, self.down_bias)
        return self._moe(x, *up, *down, ids, weights, self.alpha, self.limit)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Checkpoint tensor names and their targets on this rank. Before `prepare_weights` only."""
        sizes, experts = self._sizes, slice(0, self.num_experts)
        yield whole_tensor_target(f"{sizes.name}.down_proj_bias", self.down_bias)
        shape = self.num_experts, 2 * sizes.intermediate_size
        for source, rows in sizes.halves:
            target = WeightTarget(self.gate_up_bias, shape, (experts, source), (experts, rows))
            yield f"{sizes.name}.gate_up_proj_bias", target
        yield from sizes.float_targets(self.gate_up, self.down) if self._stack is None else self._stack.targets()

    def prepare_weights(self) -> None:
        """Converts the loaded experts to the op provider's form."""
        if not self._adds_bias:
            self.down_bias.data.zero_()
        stack, self._stack = self._stack, None
        if self.stays_quantized:
            assert stack is not None, "called once"
            self.gate_up, self.down = prepared_experts(self._op, *stack.weights())
            return
        if isinstance(stack, StackedMXFP4):
            for e in range(self.num_experts):
                self.gate_up[e], self.down[e] = stack.dequantized(e)
            for name in ("gate_up", "down"):
                setattr(self, name, self._place(getattr(self, name), self.partitions.get(name)))
        if self._op.prepare is not None:
            prepared = self._op.prepare((self.gate_up.data, self.down.data))
            del self.gate_up, self.down
            self.gate_up, self.down = prepared

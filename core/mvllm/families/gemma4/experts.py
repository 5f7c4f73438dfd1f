"""Gemma 4's experts, which run beside the MLP of a layer on the residual stream.

Of GGUF files (`stacked_experts` is false then), experts are read one by one.

residual ─┬─ norm ─ MLP ──────────────────── norm ─┐
          ├─ norm with the scale ─ router ─┐       + ─ norm ─ (added to the residual stream by the layer)
          └─ norm ─ experts ◄──────────────┘─ norm ┘
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.errors import ModelError
from mvllm.layers.activation import ACTIVATIONS
from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.layers.linear import ReplicatedLinear
from mvllm.layers.norm import RMSNorm
from mvllm.layers.rotary import CosSinRows
from mvllm.layers.routing import Routing
from mvllm.layers.stacked_moe import StackedMoE
from mvllm.layers.weight_target import WeightTarget, whole_tensor_target
from mvllm.models.llama import LlamaLayer, LlamaOptions, norm_eps
from mvllm.models.moe_config import num_experts


class Gemma4MoeLayer(LlamaLayer):
    """A decoder layer whose second block is an MLP and experts.

    Raises:
        ModelError: The experts have another activation than GELU in its tanh approximation.
    """

    def __init__(
        self,
        config: ModelConfig,
        ctx: BuildContext,
        options: LlamaOptions,
        layer: int,
        attention: nn.Module,
        mlp: nn.Module,
    ) -> None:
        super().__init__(config, ctx, options, layer, attention, mlp)
        name, size, eps = f"model.layers.{layer}", config.hidden_size, norm_eps(config, options)
        self.own_mlp_norm = RMSNorm(ctx, f"{name}.post_feedforward_layernorm_1", size, eps)
        self.experts = Gemma4Experts(config, ctx, name, options.hidden_act or "", eps)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, angles: CosSinRows, step: ForwardStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As LlamaLayer.forward."""
        assert self.input_norm is not None and self.attention_result_norm is not None, "options has these norms"
        assert self.mlp_norm is not None and self.mlp_result_norm is not None, "options has these norms"
        x, residual = self.input_norm.add_norm(x, residual)
        x = self.attention_result_norm(self.attention(x, angles, step))
        x, residual = self.mlp_norm.add_norm(x, residual)
        x = self.own_mlp_norm(self.mlp(x)) + self.experts(residual)
        return self.mlp_result_norm(x), residual


class Gemma4Experts(nn.Module):
    """Router and experts, each behind a norm of its own.

    Args:
        config, ctx: As for models.
        name: The checkpoint module of the layer.
        act: The activation.
        eps: Of the norms.
    """

    def __init__(self, config: ModelConfig, ctx: BuildContext, name: str, act: str, eps: float) -> None:
        super().__init__()
        hf, size = config.hf_config, config.hidden_size
        if ACTIVATIONS.get(act) != "gelu_tanh":
            raise ModelError(
                f"{hf.source}: hidden_activation is {act!r}, but experts are supported with 'gelu_pytorch_tanh' only."
            )
        count, top_k = num_experts(hf, "num_experts"), hf.positive_int("top_k_experts")
        routing = Routing(top_k, normalize=True)
        routing.check(count)
        self.router_norm = _RouterNorm(ctx, f"{name}.router", size, eps)
        self.router = ReplicatedLinear(ctx.floats(), f"{name}.router.proj", size, count, bias=False)
        self._scale_name = f"{name}.router.per_expert_scale"
        self.expert_scale = ctx.floats(torch.float32).parameter(count)
        self.norm = RMSNorm(ctx, f"{name}.pre_feedforward_layernorm_2", size, eps)
        inner = hf.positive_int("moe_intermediate_size")
        self.experts = StackedMoE(
            ctx,
            f"{name}.experts",
            size,
            inner,
            num_experts=count,
            top_k=top_k,
            op="gelu_tanh_moe",
            is_stacked=bool(hf.get("stacked_experts", True)),
        )
        self.result_norm = RMSNorm(ctx, f"{name}.post_feedforward_layernorm_2", size, eps)
        facts = {"top_k": top_k, "scores": routing.scores, "num_groups": routing.num_groups}
        self._select_experts = ctx.op("select_experts", num_experts=count, **facts).function
        self._routing, self._tp = routing.arguments(), ctx.tp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] to [T, hidden_size]."""
        weights, ids = self._select_experts(self.router(self.router_norm(x)), None, *self._routing)
        routed = self.experts(self.norm(x), weights * self.expert_scale[ids], ids)
        return self.result_norm(self._tp.all_reduce(routed))

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """The target of the experts' factors; the other modules have their own targets."""
        yield whole_tensor_target(self._scale_name, self.expert_scale)


class _RouterNorm(RMSNorm):
    """The norm before the router. Its weight is `scale` of the router divided by the square root of the size."""

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Checkpoint tensor names and their targets on this rank."""
        yield whole_tensor_target(f"{self.name}.scale", self.weight)

    def prepare_weights(self) -> None:
        """Divides once, after loading."""
        self.weight.mul_(len(self.weight) ** -0.5)

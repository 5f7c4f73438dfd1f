"""Qwen2-MoE: Qwen2 with experts and one shared expert, which has a gate."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.errors import ModelError
from mvllm.layers.context import BuildContext
from mvllm.layers.fused_moe import FusedMoE
from mvllm.layers.linear import ReplicatedLinear
from mvllm.layers.routing import Routing
from mvllm.layers.sparse_moe_block import SparseMoeBlock
from mvllm.models.layer_windows import layer_windows
from mvllm.models.llama import LlamaForCausalLM, LlamaOptions
from mvllm.models.moe_config import check_activation, num_experts, shared_mlp


class Qwen2MoeForCausalLM(LlamaForCausalLM):
    """`Qwen2MoeForCausalLM` of Hugging Face checkpoints.

    Attributes:
        normalizes_weights_by_default: Default of `norm_topk_prob`.
    """

    normalizes_weights_by_default: ClassVar[bool] = False

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """Query, key and value have biases. Without `layer_types`, every other layer below a number has a window."""
        stop = config.hf_config.get("max_window_layers", 28)
        windows = layer_windows(config, lambda layer: bool(layer % 2 or layer >= stop))
        return LlamaOptions(windows=windows, qkv_bias=bool(config.hf_config.get("qkv_bias", True)))

    def build_mlp(self, ctx: BuildContext, options: LlamaOptions, layer: int) -> nn.Module:
        hf, name = self.config.hf_config, f"model.layers.{layer}.mlp"
        if not self._is_sparse(layer):
            return super().build_mlp(ctx, options, layer)
        check_activation(hf)
        count, top_k = num_experts(hf, "num_experts", "num_local_experts"), hf.positive_int("num_experts_per_tok")
        hidden_size, size = self.config.hidden_size, hf.positive_int("moe_intermediate_size")
        experts = FusedMoE(ctx, f"{name}.experts", hidden_size, size, num_experts=count, top_k=top_k)
        routing = Routing(top_k, normalize=bool(hf.get("norm_topk_prob", self.normalizes_weights_by_default)))
        return SparseMoeBlock(ctx, f"{name}.gate", experts, routing, shared_experts=self.build_shared(ctx, name))

    def build_shared(self, ctx: BuildContext, name: str) -> nn.Module | None:
        """The shared expert of the block `name`; None where the family has none."""
        return SharedExpert(self.config, ctx, name)

    def _is_sparse(self, layer: int) -> bool:
        hf = self.config.hf_config
        dense = hf.get("mlp_only_layers", [])
        if not isinstance(dense, list) or not all(isinstance(number, int) for number in dense):
            raise ModelError(f"{hf.source}: 'mlp_only_layers' should be a list of layer numbers, found {dense!r}.")
        return layer not in dense and (layer + 1) % hf.positive_int("decoder_sparse_step", 1) == 0


class SharedExpert(nn.Module):
    """An MLP that is applied to every token, times the sigmoid of a gate.

    Args:
        config, ctx: As for models.
        name: The checkpoint module of the MoE block.
    """

    def __init__(self, config: ModelConfig, ctx: BuildContext, name: str) -> None:
        super().__init__()
        size = config.hf_config.positive_int("shared_expert_intermediate_size", 5632)
        self.mlp = shared_mlp(config, ctx, f"{name}.shared_expert", size)
        self._sigmoid = ctx.op("sigmoid", size=1).function
        self.gate = ReplicatedLinear(ctx.floats(), f"{name}.shared_expert_gate", config.hidden_size, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] to [T, hidden_size]."""
        return self._sigmoid(self.gate(x)) * self.mlp(x)

"""Qwen2-MoE: Qwen2 with experts, and beside them one that every token visits, weighted by a gate of its own."""

from __future__ import annotations

import torch
from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.errors import ModelError
from mvllm.layers.context import BuildContext
from mvllm.layers.experts import GatedExperts
from mvllm.layers.linear import ReplicatedLinear
from mvllm.layers.moe import MoE
from mvllm.layers.routing import Routing
from mvllm.models.llama import LlamaForCausalLM, LlamaOptions, dense_mlp
from mvllm.models.qwen2 import layer_windows
from mvllm.models.sparse import check_activation, num_experts


class Qwen2MoeForCausalLM(LlamaForCausalLM):
    """`Qwen2MoeForCausalLM` of Hugging Face checkpoints."""

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """Query, key and value have biases; which layers have windows is said by `layer_types`."""
        return LlamaOptions(
            windows=_windows(config), qkv_bias=bool(config.hf_config.get("qkv_bias", True)), mlp=_experts_and_shared
        )


class SharedExpert(nn.Module):
    """An MLP for every token, times the sigmoid of a gate.

    Args:
        config, ctx: As models take them.
        name: The checkpoint module of the block.
    """

    def __init__(self, config: ModelConfig, ctx: BuildContext, name: str) -> None:
        super().__init__()
        size = config.hf_config.positive_int("shared_expert_intermediate_size", 5632)
        self.mlp = dense_mlp(config, ctx, f"{name}.shared_expert", size)
        self.gate = ReplicatedLinear(ctx.floats(), f"{name}.shared_expert_gate", config.hidden_size, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] to [T, hidden_size]."""
        return torch.sigmoid(self.gate(x)) * self.mlp(x)


def sparse_block(config: ModelConfig, ctx: BuildContext, layer: int, beside: nn.Module | None = None) -> nn.Module:
    """The experts of a layer, or its MLP where it has none (`decoder_sparse_step`, `mlp_only_layers`).

    Args:
        config, ctx, layer: As for MLPMaker.
        beside: As in MoE.

    Raises:
        ModelError: config.json does not say what it should.
    """
    hf, name = config.hf_config, f"model.layers.{layer}.mlp"
    if not is_sparse(config, layer):
        return dense_mlp(config, ctx, name)
    check_activation(hf)
    count, top_k = num_experts(hf, "num_experts", "num_local_experts"), hf.positive_int("num_experts_per_tok")
    size = hf.positive_int("moe_intermediate_size")
    experts = GatedExperts(ctx, f"{name}.experts", config.hidden_size, size, num_experts=count, top_k=top_k)
    routing = Routing(top_k, normalize=bool(hf.get("norm_topk_prob", False)))
    return MoE(ctx, f"{name}.gate", experts, config.hidden_size, count, routing, beside=beside)


def is_sparse(config: ModelConfig, layer: int) -> bool:
    """Whether a layer has experts.

    Raises:
        ModelError: `mlp_only_layers` is no list of layers.
    """
    hf = config.hf_config
    dense = hf.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(isinstance(number, int) for number in dense):
        raise ModelError(f"{hf.source}: 'mlp_only_layers' should be a list of numbers of layers, found {dense!r}.")
    return layer not in dense and (layer + 1) % hf.positive_int("decoder_sparse_step", 1) == 0


def _experts_and_shared(config: ModelConfig, ctx: BuildContext, layer: int) -> nn.Module:
    sparse = is_sparse(config, layer)
    return sparse_block(config, ctx, layer, SharedExpert(config, ctx, f"model.layers.{layer}.mlp") if sparse else None)


def _windows(config: ModelConfig) -> tuple[int | None, ...]:
    """As `layer_types` says, else every other layer below `max_window_layers`, beginning with the first."""
    if "layer_types" in config.hf_config:
        return layer_windows(config)
    stop = config.hf_config.get("max_window_layers", 28)
    layers = range(config.num_layers)
    return tuple(config.sliding_window if layer % 2 == 0 and layer < stop else None for layer in layers)

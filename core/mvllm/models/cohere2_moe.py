"""Cohere2 with experts: attention and MLP in parallel after one norm, windows, NoPE layers, and shared experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mvllm.config.hf_config import HFConfig
from mvllm.config.model import ModelConfig
from mvllm.config.rope_parameters import rope_type_of
from mvllm.errors import ModelError
from mvllm.layers.context import BuildContext
from mvllm.layers.fused_moe import FusedMoE
from mvllm.layers.mlp import GatedMLP
from mvllm.layers.norm import BiaslessLayerNorm, RMSNorm
from mvllm.layers.routing import Routing
from mvllm.layers.sparse_moe_block import SparseMoeBlock
from mvllm.models.llama import LayerNorms, LlamaForCausalLM, LlamaOptions
from mvllm.models.moe_config import check_activation, shared_mlp

_SLIDING, _FULL = "sliding_attention", "full_attention"


class HalvedMLP(nn.Module):
    """Half of the result of an MLP, where routed and shared experts are averaged.

    Args:
        mlp: The MLP.
    """

    def __init__(self, mlp: GatedMLP) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] to [T, hidden_size]."""
        return self.mlp(x) * 0.5


class Cohere2MoeForCausalLM(LlamaForCausalLM):
    """`Cohere2MoeForCausalLM` of Hugging Face checkpoints."""

    ties_embeddings_by_default = True

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """Layers with a window have interleaved rotary embedding, and so have dense layers if the config says so.

        Raises:
            ModelError: The RoPE scaling is in a place where transformers ignores it.
        """
        hf = config.hf_config
        scaling = hf.get("rope_scaling", {})
        if isinstance(scaling, dict) and rope_type_of(scaling) != "default":
            raise ModelError(
                f"{hf.source}: transformers ignores 'rope_scaling' in this family, so it is not clear whether the "
                "model has the scaling. Write it as 'rope_parameters', with rope_theta, or remove it."
            )
        window = hf.positive_int("sliding_window", 4096)
        types, dense = _layer_types(config), _dense_layers(config)
        dense_with_rope = dense if hf.get("prefix_dense_sliding_window_pattern", 1) == 1 else frozenset()
        bias, has_rms_norm = bool(hf.get("attention_bias", False)), "rms_norm_eps" in hf
        eps = "rms_norm_eps" if has_rms_norm else "layer_norm_eps"
        return LlamaOptions(
            windows=tuple(window if kind == _SLIDING else None for kind in types),
            qkv_bias=bias,
            output_bias=bias,
            norms=LayerNorms(before_mlp=None),
            parallel_blocks=True,
            norm=RMSNorm if has_rms_norm else BiaslessLayerNorm,
            eps=hf.positive_number(eps, 1e-5),
            nope_layers=frozenset(i for i, kind in enumerate(types) if kind == _FULL and i not in dense_with_rope),
            interleaved_rotary=True,
            logits_scale=1.0 / hf.positive_number("logit_scale", 0.0625),
        )

    def build_mlp(self, ctx: BuildContext, options: LlamaOptions, layer: int) -> nn.Module:
        hf, name, hidden_size = self.config.hf_config, f"model.layers.{layer}.mlp", self.config.hidden_size
        size = hf.positive_int("intermediate_size")
        if layer in _dense_layers(self.config):
            return shared_mlp(self.config, ctx, name, hf.positive_int("prefix_dense_intermediate_size", size))
        check_activation(hf)
        count, top_k = hf.positive_int("num_experts", 8), hf.positive_int("num_experts_per_tok", 2)
        num_shared = hf.positive_int("num_shared_experts") if hf.get("num_shared_experts", 0) else 0
        how = hf.get("shared_expert_combination_strategy", "average")
        shared: nn.Module | None = None
        if num_shared:
            mlp = shared_mlp(self.config, ctx, f"{name}.shared_experts", size * num_shared)
            shared = (
                HalvedMLP(mlp) if _one_of(hf, "shared_expert_combination_strategy", how, ("sum", "average")) else mlp
            )
        scale = 0.5 if isinstance(shared, HalvedMLP) else 1.0
        if _one_of(hf, "expert_selection_fn", hf.get("expert_selection_fn", "softmax"), ("softmax", "sigmoid")):
            routing = Routing(top_k, "sigmoid", normalize=bool(hf.get("norm_topk_prob", True)), scale=scale)
        else:
            routing = Routing(top_k, "softmax_of_chosen", scale=scale)
        experts = FusedMoE(ctx, f"{name}.experts", hidden_size, size, num_experts=count, top_k=top_k)
        return SparseMoeBlock(ctx, f"{name}.gate", experts, routing, shared_experts=shared)


def _one_of(hf: HFConfig, key: str, found: object, allowed: Sequence[Any]) -> int:
    """The index of a value among those allowed.

    Raises:
        ModelError: It is none of them.
    """
    if found not in allowed:
        raise ModelError(f"{hf.source}: {key!r} should be {' or '.join(map(repr, allowed))}, found {found!r}.")
    return list(allowed).index(found)


def _layer_types(config: ModelConfig) -> list[str]:
    hf, count = config.hf_config, config.num_layers
    types = hf.get("layer_types")
    if types is None:
        first, prefix = hf.get("first_k_dense_replace", 0), hf.positive_int("prefix_dense_sliding_window_pattern", 1)
        period = hf.positive_int("sliding_window_pattern", 4)
        places = [(i, prefix) if i < first else (i - first, period) for i in range(count)]
        return [_FULL if (i + 1) % every == 0 else _SLIDING for i, every in places]
    if not isinstance(types, list) or len(types) != count or not set(types) <= {_SLIDING, _FULL}:
        raise ModelError(
            f"{hf.source}: layer_types should name {_FULL} or {_SLIDING} for each of the {count} layers, found {types}."
        )
    return types


def _dense_layers(config: ModelConfig) -> frozenset[int]:
    types = config.hf_config.get("mlp_layer_types")
    if not isinstance(types, list):
        return frozenset(range(config.hf_config.get("first_k_dense_replace", 0)))
    return frozenset(layer for layer, kind in enumerate(types) if kind == "dense")

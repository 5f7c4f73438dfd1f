"""Kimi Linear: Kimi Delta Attention and, in some layers, latent attention without rotary embedding; experts.

Published checkpoints and those of transformers name some config keys differently; both are read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mvllm.config.hf_config import HFConfig
from mvllm.config.model import ModelConfig
from mvllm.errors import ModelError
from mvllm.families.kimi_linear.kimi_delta_attention import KimiDeltaAttention, KimiDeltaConfig
from mvllm.layers.context import BuildContext
from mvllm.layers.fused_moe import FusedMoE
from mvllm.layers.mla_attention import MLAAttention, MLAConfig
from mvllm.layers.rotary import RotaryEmbedding
from mvllm.layers.routing import Routing
from mvllm.layers.sparse_moe_block import SparseMoeBlock
from mvllm.models.layer_kinds import ATTENTION, layer_kinds
from mvllm.models.llama import LlamaForCausalLM, LlamaOptions, norm_eps
from mvllm.models.module_names import ModuleNames
from mvllm.models.moe_config import check_activation, has_dense_mlp, shared_mlp

_ROUTED_SCALE = 2.446


class KimiLinearForCausalLM(LlamaForCausalLM):
    """`KimiLinearForCausalLM` of Hugging Face checkpoints, with DeepSeek's names of modules."""

    module_names = ModuleNames({"block_sparse_moe": "mlp", "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"})

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """No positional encoding: the delta attention depends on the order of the tokens."""
        hf = config.hf_config
        if not hf.get("mla_use_nope", True):
            raise ModelError(
                f"{hf.source}: mla_use_nope is false, but latent attention of this family is supported without rotary "
                "embedding only."
            )
        scores = hf.get("moe_router_activation_func", "sigmoid")
        if scores != "sigmoid":
            raise ModelError(
                f"{hf.source}: moe_router_activation_func is {scores!r}, but experts of this family are supported with "
                "'sigmoid' only."
            )
        check_activation(hf, "experts and delta attention")
        nope = frozenset(range(config.num_layers))
        return LlamaOptions(eps=hf.positive_number("rms_norm_eps", 1e-5), nope_layers=nope)

    def build_attention(
        self, ctx: BuildContext, options: LlamaOptions, rotary: RotaryEmbedding, layer: int
    ) -> nn.Module:
        hf, name = self.config.hf_config, f"model.layers.{layer}.self_attn"
        linear = _linear_attn_config(hf)
        if self._has_attention(layer):
            shape = MLAConfig.from_config(self.config)
            return MLAAttention(ctx, name, shape, None)
        sizes = KimiDeltaConfig(
            self.config.hidden_size,
            num_heads=linear.positive_int("num_heads", hf.positive_int("linear_num_heads", 32)),
            head_dim=linear.positive_int("head_dim", hf.positive_int("linear_head_dim", 128)),
            conv_kernel_size=linear.positive_int(
                "short_conv_kernel_size", hf.positive_int("linear_conv_kernel_dim", 4)
            ),
            eps=norm_eps(self.config, options),
        )
        return KimiDeltaAttention(ctx, name, sizes)

    def build_mlp(self, ctx: BuildContext, options: LlamaOptions, layer: int) -> nn.Module:
        hf, name, hidden_size = self.config.hf_config, f"model.layers.{layer}.mlp", self.config.hidden_size
        if self._is_dense(layer):
            return super().build_mlp(ctx, options, layer)
        count, size = _size(hf, "num_experts", "num_local_experts"), hf.positive_int("moe_intermediate_size")
        routing = Routing(
            _size(hf, "num_experts_per_token", "num_experts_per_tok"),
            "sigmoid",
            normalize=bool(_first(hf, True, "moe_renormalize", "norm_topk_prob")),
            scale=hf.positive_number("routed_scaling_factor", _ROUTED_SCALE),
            num_groups=_size(hf, "num_expert_group", "n_group", default=1),
            top_groups=hf.positive_int("topk_group", 1),
            group_by="best_two",
        )
        shared_size = size * int(_first(hf, 1, "num_shared_experts", "n_shared_experts"))
        return SparseMoeBlock(
            ctx,
            f"{name}.gate",
            FusedMoE(ctx, f"{name}.experts", hidden_size, size, num_experts=count, top_k=routing.top_k),
            routing,
            correction=f"{name}.gate.e_score_correction_bias",
            router_dtype=torch.float32,
            shared_experts=shared_mlp(self.config, ctx, f"{name}.shared_experts", shared_size) if shared_size else None,
        )

    def _has_attention(self, layer: int) -> bool:
        """`layer_types`, or the numbers of `linear_attn_config`, which start at one."""
        attention = _linear_attn_config(self.config.hf_config).get("full_attn_layers")

        def is_attention(number: int) -> bool:
            return number > 0 and number % 4 == 0 if attention is None else number + 1 in attention

        return layer_kinds(self.config, "linear_attention", is_attention=is_attention)[layer] == ATTENTION

    def _is_dense(self, layer: int) -> bool:
        hf = self.config.hf_config

        def is_dense(number: int) -> bool:
            return number < hf.get("first_k_dense_replace", 1) or number % hf.positive_int("moe_layer_freq", 1) != 0

        return has_dense_mlp(self.config, layer, is_dense)


def _linear_attn_config(hf: HFConfig) -> HFConfig:
    """Settings of the delta attention in published checkpoints; empty in those of transformers."""
    settings = hf.get("linear_attn_config", {})
    if not isinstance(settings, dict):
        raise ModelError(f"{hf.source}: 'linear_attn_config' should be a JSON object, found {settings!r}.")
    return HFConfig(settings, f"{hf.source}: 'linear_attn_config'")


def _first(hf: HFConfig, default: Any, *keys: str) -> Any:
    """The value of the first of `keys` that the config has."""
    return next((hf.get(key) for key in keys if key in hf), default)


def _size(hf: HFConfig, *keys: str, default: int | None = None) -> int:
    return hf.positive_int(next((key for key in keys if key in hf), keys[0]), default)

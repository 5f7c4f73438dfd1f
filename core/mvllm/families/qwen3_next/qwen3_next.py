"""Qwen3-Next: gated delta nets and, in every fourth layer, attention with gated heads; experts with a shared one."""

from __future__ import annotations

import re
from typing import ClassVar

import torch
from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.config.rope_parameters import RopeParameters
from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.layers.gated_delta_net import DeltaNetConfig, DeltaNetNames, GatedDeltaNet
from mvllm.layers.norm import GemmaRMSNorm
from mvllm.layers.rotary import CosSinRows, RotaryEmbedding
from mvllm.models.layer_kinds import ATTENTION, layer_kinds
from mvllm.models.llama import LlamaAttention, LlamaOptions, norm_eps
from mvllm.models.moe_config import check_activation
from mvllm.models.qwen2_moe import Qwen2MoeForCausalLM


class GatedAttention(LlamaAttention):
    """LlamaAttention that multiplies the result of each head by the sigmoid of a gate."""

    def __init__(
        self, config: ModelConfig, ctx: BuildContext, options: LlamaOptions, rotary: RotaryEmbedding, layer: int
    ) -> None:
        super().__init__(config, ctx, options, rotary, layer)
        self._sigmoid = ctx.op("sigmoid", size=self.qkv.heads.num_heads * config.head_size).function

    def forward(self, x: torch.Tensor, angles: CosSinRows, step: ForwardStep) -> torch.Tensor:
        query, key, value, gate = self.qkv.split_gated(x)
        found = self._rotary_attention(angles, query, key, value, step)
        return self.output(found * self._sigmoid(gate))


class Qwen3NextForCausalLM(Qwen2MoeForCausalLM):
    """`Qwen3NextForCausalLM` of Hugging Face checkpoints, without the multi-token-prediction layers."""

    ignored_names = re.compile(rf"^mtp\.|{Qwen2MoeForCausalLM.ignored_names.pattern}")
    normalizes_weights_by_default = True
    delta_net_names: ClassVar[DeltaNetNames] = DeltaNetNames(
        {"in_proj_qkvz": "qkvz", "in_proj_ba": "ba"}, by_group=True
    )
    separate_names: ClassVar[DeltaNetNames] = DeltaNetNames(
        {"in_proj_qkv": "qkv", "in_proj_z": "z", "in_proj_b": "b", "in_proj_a": "a"}
    )
    """Those of GGUF files, whose derived config says `grouped_projections` = false."""

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """Norms store the weight minus one; a quarter of each head is rotated."""
        hf = config.hf_config
        check_activation(hf, "gated delta nets")
        bias = bool(hf.get("attention_bias", False))
        return LlamaOptions(
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=True,
            gated_attention=True,
            norm=GemmaRMSNorm,
            rope=RopeParameters.from_config(hf, config.head_size, partial=0.25),
        )

    def build_attention(
        self, ctx: BuildContext, options: LlamaOptions, rotary: RotaryEmbedding, layer: int
    ) -> nn.Module:
        hf = self.config.hf_config
        interval = hf.positive_int("full_attention_interval", 4)
        kinds = layer_kinds(self.config, "linear_attention", is_attention=lambda number: (number + 1) % interval == 0)
        if kinds[layer] == ATTENTION:
            return GatedAttention(self.config, ctx, options, rotary, layer)
        sizes = DeltaNetConfig(
            self.config.hidden_size,
            num_key_heads=hf.positive_int("linear_num_key_heads", 16),
            num_value_heads=hf.positive_int("linear_num_value_heads", 32),
            key_head_dim=hf.positive_int("linear_key_head_dim", 128),
            value_head_dim=hf.positive_int("linear_value_head_dim", 128),
            conv_kernel_size=hf.positive_int("linear_conv_kernel_dim", 4),
            eps=norm_eps(self.config, options),
        )
        names = self.delta_net_names if hf.get("grouped_projections", True) else self.separate_names
        return GatedDeltaNet(ctx, f"model.layers.{layer}.linear_attn", sizes, names)

    def _is_sparse(self, layer: int) -> bool:
        return self.config.hf_config.get("num_experts", 512) != 0 and super()._is_sparse(layer)

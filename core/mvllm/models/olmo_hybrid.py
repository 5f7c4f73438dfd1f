"""OLMo hybrid: gated delta nets with norms before their blocks, and OLMo 2's attention with norms after its blocks.

Published checkpoints have no rotary embedding: their `rope_theta` is null.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.config.rope_parameters import rope_settings
from mvllm.layers.context import BuildContext
from mvllm.layers.gated_delta_net import DeltaNetConfig, DeltaNetNames, GatedDeltaNet
from mvllm.layers.rotary import RotaryEmbedding
from mvllm.models.layer_kinds import ATTENTION, layer_kinds
from mvllm.models.llama import LayerNorms, LlamaOptions
from mvllm.models.moe_config import check_activation
from mvllm.models.olmo2 import Olmo2ForCausalLM

_NAMES = DeltaNetNames(
    {"q_proj": "q", "k_proj": "k", "v_proj": "v", "g_proj": "z", "b_proj": "b", "a_proj": "a"},
    conv={"q_conv1d": "q", "k_conv1d": "k", "v_conv1d": "v"},
    norm="o_norm",
    output="o_proj",
)
_NORM_EPS = 1e-5  # of the gated delta net; independent of rms_norm_eps


class OlmoHybridForCausalLM(Olmo2ForCausalLM):
    """`OlmoHybridForCausalLM` of Hugging Face checkpoints."""

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """OLMo 2's, with another default of `rms_norm_eps`, and without rotary embedding in some checkpoints."""
        check_activation(config.hf_config, "gated delta nets")
        return replace(
            super().options(config),
            eps=config.hf_config.positive_number("rms_norm_eps", 1e-6),
            nope_layers=frozenset() if _has_rope(config) else frozenset(range(config.num_layers)),
        )

    def build_layer(
        self, ctx: BuildContext, options: LlamaOptions, layer: int, attention: nn.Module, mlp: nn.Module
    ) -> nn.Module:
        """Layers with a gated delta net have norms before their blocks instead of after them."""
        if not self._has_attention(layer):
            options = replace(options, norms=LayerNorms())
        return super().build_layer(ctx, options, layer, attention, mlp)

    def model_name(self, name: str) -> str:
        """Names of norms as transformers has them."""
        name = name.replace(".attention_layer_norm.", ".input_layernorm.")
        return name.replace(".feedforward_layer_norm.", ".post_attention_layernorm.")

    def build_attention(
        self, ctx: BuildContext, options: LlamaOptions, rotary: RotaryEmbedding, layer: int
    ) -> nn.Module:
        if self._has_attention(layer):
            return super().build_attention(ctx, options, rotary, layer)
        hf, hidden_size, num_heads = self.config.hf_config, self.config.hidden_size, self.config.num_heads
        num_key_heads = hf.positive_int("linear_num_key_heads", num_heads)
        key_head_dim = hf.positive_int("linear_key_head_dim", int(0.75 * hidden_size / num_key_heads))
        sizes = DeltaNetConfig(
            hidden_size,
            num_key_heads,
            num_value_heads=hf.positive_int("linear_num_value_heads", num_heads),
            key_head_dim=key_head_dim,
            value_head_dim=hf.positive_int("linear_value_head_dim", 2 * key_head_dim),
            conv_kernel_size=hf.positive_int("linear_conv_kernel_dim", 4),
            eps=_NORM_EPS,
            beta_scale=2.0 if hf.get("linear_allow_neg_eigval", True) else 1.0,
        )
        return GatedDeltaNet(ctx, f"model.layers.{layer}.linear_attn", sizes, _NAMES)

    def _has_attention(self, layer: int) -> bool:
        count = self.config.num_layers

        def is_attention(number: int) -> bool:
            return number % 4 == 3 or (count < 4 and number == count - 1)

        return layer_kinds(self.config, "linear_attention", is_attention=is_attention)[layer] == ATTENTION


def _has_rope(config: ModelConfig) -> bool:
    """Whether the attention has rotary embedding: not if `rope_theta` is null. Without that key it has."""
    for settings in (rope_settings(config.hf_config), config.hf_config.as_dict()):
        if "rope_theta" in settings:
            return settings["rope_theta"] is not None
    return True

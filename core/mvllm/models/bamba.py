"""Bamba: Llama with Mamba-2 layers instead of attention in most layers."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.config.rope_parameters import RopeParameters
from mvllm.errors import ModelError
from mvllm.layers.context import BuildContext
from mvllm.layers.mamba2_mixer import Mamba2Mixer
from mvllm.layers.rotary import RotaryEmbedding
from mvllm.models.llama import LayerNorms, LlamaForCausalLM, LlamaOptions
from mvllm.models.mamba_hybrid import mamba2_config
from mvllm.models.module_names import ModuleNames


class BambaForCausalLM(LlamaForCausalLM):
    """`BambaForCausalLM` of Hugging Face checkpoints."""

    module_names = ModuleNames({"model.final_layernorm": "model.norm", "feed_forward": "mlp"})

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """Llama's options with other names of norms; half of each attention head is rotated."""
        return replace(
            super().options(config),
            norms=LayerNorms(before_mlp="pre_ff_layernorm"),
            rope=RopeParameters.from_config(config.hf_config, config.head_size, partial=0.5),
            eps=config.hf_config.positive_number("rms_norm_eps", 1e-5),
        )

    def build_attention(
        self, ctx: BuildContext, options: LlamaOptions, rotary: RotaryEmbedding, layer: int
    ) -> nn.Module:
        hf = self.config.hf_config
        attention = hf.get("attn_layer_indices", [])
        if not isinstance(attention, list) or not all(isinstance(number, int) for number in attention):
            raise ModelError(
                f"{hf.source}: 'attn_layer_indices' should be a list of layer numbers, found {attention!r}."
            )
        if layer in attention:
            return super().build_attention(ctx, options, rotary, layer)
        return Mamba2Mixer(ctx, f"model.layers.{layer}.mamba", mamba2_config(self.config))

"""Granite 4: Granite MoE with Mamba-2 layers instead of attention in most layers.

Models without routed experts (`num_local_experts` = 0) have the shared expert only. Models whose
`position_embedding_type` is not `rope` have no position embedding.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.layers.context import BuildContext
from mvllm.layers.mamba2_mixer import Mamba2Mixer
from mvllm.layers.rotary import RotaryEmbedding
from mvllm.models.granite_moe import GraniteMoeForCausalLM
from mvllm.models.layer_kinds import layer_kinds
from mvllm.models.llama import LlamaOptions
from mvllm.models.mamba_hybrid import MAMBA, OLD_NAMES, mamba2_config


class GraniteMoeHybridForCausalLM(GraniteMoeForCausalLM):
    """`GraniteMoeHybridForCausalLM` of Hugging Face checkpoints."""

    shared_size = 1024

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """Granite's, without rotary embedding unless the config asks for it."""
        options = super().options(config)
        if config.hf_config.get("position_embedding_type") == "rope":
            return options
        return replace(options, nope_layers=frozenset(range(config.num_layers)))

    def build_attention(
        self, ctx: BuildContext, options: LlamaOptions, rotary: RotaryEmbedding, layer: int
    ) -> nn.Module:
        if layer_kinds(self.config, MAMBA, old_names=OLD_NAMES)[layer] == MAMBA:
            return Mamba2Mixer(ctx, f"model.layers.{layer}.mamba", mamba2_config(self.config))
        return super().build_attention(ctx, options, rotary, layer)

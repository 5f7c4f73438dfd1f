"""Granite: Llama with multipliers on embeddings, attention scores, residual sums and logits."""

from __future__ import annotations

from dataclasses import replace

from mvllm.config.model import ModelConfig
from mvllm.models.llama import LlamaForCausalLM, LlamaOptions


class GraniteForCausalLM(LlamaForCausalLM):
    """`GraniteForCausalLM` of Hugging Face checkpoints."""

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """Llama's options with the multipliers; 1 if the config does not have one."""
        hf = config.hf_config
        return replace(
            super().options(config),
            embedding_scale=hf.positive_number("embedding_multiplier", 1.0),
            attention_scale=hf.positive_number("attention_multiplier", 1.0),
            residual_scale=hf.positive_number("residual_multiplier", 1.0),
            logits_scale=hf.positive_number("logits_scaling", 1.0),
        )

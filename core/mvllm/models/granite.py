"""Granite: Llama with a multiplier at each of four places: embeddings, scores, residual sums, logits."""

from __future__ import annotations

from dataclasses import replace

from mvllm.config.model import ModelConfig
from mvllm.models.llama import LlamaForCausalLM, LlamaOptions


class GraniteForCausalLM(LlamaForCausalLM):
    """`GraniteForCausalLM` of Hugging Face checkpoints."""

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """Llama's, with the multipliers; each is one where the config lacks it."""
        hf = config.hf_config
        return replace(
            super().options(config),
            embedding_scale=hf.positive_number("embedding_multiplier", 1.0),
            attention_scale=hf.positive_number("attention_multiplier", 1.0),
            residual_scale=hf.positive_number("residual_multiplier", 1.0),
            logits_scale=hf.positive_number("logits_scaling", 1.0),
        )

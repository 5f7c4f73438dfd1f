"""Mistral: Llama with a sliding window on every layer."""

from __future__ import annotations

from mvllm.config.model import ModelConfig
from mvllm.models.llama import LlamaForCausalLM, LlamaOptions


class MistralForCausalLM(LlamaForCausalLM):
    """`MistralForCausalLM` of Hugging Face checkpoints."""

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """No biases; the window, if any, applies to every layer."""
        return LlamaOptions(windows=(config.sliding_window,) * config.num_layers)

"""Mistral: Llama with a sliding window on every layer."""

from __future__ import annotations

from mvllm.config.model import ModelConfig
from mvllm.models.llama import LlamaOptions
from mvllm.models.text_part import TextPart


class MistralForCausalLM(TextPart):
    """`MistralForCausalLM` of Hugging Face checkpoints, and the text part of Mistral 3 ones."""

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """No biases; the window, if any, applies to every layer."""
        return LlamaOptions(windows=(config.sliding_window,) * config.num_layers)

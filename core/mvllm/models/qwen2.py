"""Qwen2: Llama with biases on query, key and value, and sliding windows on some layers."""

from __future__ import annotations

from mvllm.config.model import ModelConfig
from mvllm.models.layer_windows import layer_windows
from mvllm.models.llama import LlamaForCausalLM, LlamaOptions


class Qwen2ForCausalLM(LlamaForCausalLM):
    """`Qwen2ForCausalLM` of Hugging Face checkpoints."""

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """Query, key and value have biases."""
        return LlamaOptions(windows=layer_windows(config), qkv_bias=True)

"""Qwen3: Llama with norms on queries and keys, and sliding windows on some layers."""

from __future__ import annotations

from mvllm.config.model import ModelConfig
from mvllm.models.layer_windows import layer_windows
from mvllm.models.llama import LlamaForCausalLM, LlamaOptions


class Qwen3ForCausalLM(LlamaForCausalLM):
    """`Qwen3ForCausalLM` of Hugging Face checkpoints."""

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """Queries and keys are normalised; biases come together or not at all."""
        bias = bool(config.hf_config.get("attention_bias", False))
        return LlamaOptions(windows=layer_windows(config), qkv_bias=bias, output_bias=bias, qk_norm=True)

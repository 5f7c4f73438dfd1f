"""Qwen3-MoE: Qwen3 with experts."""

from __future__ import annotations

from mvllm.config.model import ModelConfig
from mvllm.models.llama import LlamaForCausalLM, LlamaOptions
from mvllm.models.qwen2_moe import sparse_block


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    """`Qwen3MoeForCausalLM` of Hugging Face checkpoints."""

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """Queries and keys are normalised; the window, where there is one, counts on every layer."""
        bias = bool(config.hf_config.get("attention_bias", False))
        windows = (config.sliding_window,) * config.num_layers
        return LlamaOptions(windows=windows, qkv_bias=bias, output_bias=bias, qk_norm=True, mlp=sparse_block)

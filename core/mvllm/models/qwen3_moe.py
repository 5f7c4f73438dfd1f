"""Qwen3-MoE: Qwen3 with experts."""

from __future__ import annotations

from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.layers.context import BuildContext
from mvllm.models.llama import LlamaOptions
from mvllm.models.qwen2_moe import Qwen2MoeForCausalLM


class Qwen3MoeForCausalLM(Qwen2MoeForCausalLM):
    """`Qwen3MoeForCausalLM` of Hugging Face checkpoints."""

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """Queries and keys are normalised; the window, if any, applies to every layer."""
        bias = bool(config.hf_config.get("attention_bias", False))
        windows = (config.sliding_window,) * config.num_layers
        return LlamaOptions(windows=windows, qkv_bias=bias, output_bias=bias, qk_norm=True)

    def build_shared(self, ctx: BuildContext, name: str) -> nn.Module | None:
        """None: the family has no shared expert."""
        return None

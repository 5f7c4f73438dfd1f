"""Seed-OSS: Llama with biases on queries, keys and values."""

from __future__ import annotations

from mvllm.config.model import ModelConfig
from mvllm.models.llama import LlamaForCausalLM, LlamaOptions


class SeedOssForCausalLM(LlamaForCausalLM):
    """`SeedOssForCausalLM` of Hugging Face checkpoints."""

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """The output projection of the attention has a key of its own for its bias."""
        hf = config.hf_config
        return LlamaOptions(
            qkv_bias=bool(hf.get("attention_bias", True)),
            output_bias=bool(hf.get("attention_out_bias", False)),
            mlp_bias=bool(hf.get("mlp_bias", False)),
        )

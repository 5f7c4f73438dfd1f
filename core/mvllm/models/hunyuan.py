"""Hunyuan, the dense models: Llama with norms on queries and keys after the rotary embedding."""

from __future__ import annotations

from mvllm.config.model import ModelConfig
from mvllm.models.llama import LlamaForCausalLM, LlamaOptions


class HunYuanDenseV1ForCausalLM(LlamaForCausalLM):
    """`HunYuanDenseV1ForCausalLM` of Hugging Face checkpoints."""

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """The attention has biases on all its projections or on none."""
        bias = bool(config.hf_config.get("attention_bias", False))
        return LlamaOptions(
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=True,
            qk_norm_names=("query_layernorm", "key_layernorm"),
            qk_norm_last=True,
            eps=config.hf_config.positive_number("rms_norm_eps", 1e-5),
        )

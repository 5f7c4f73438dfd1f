"""Hunyuan, the dense models: Llama with norms on queries and keys after the rotary embedding.

A RoPE scaling of type `dynamic` with `alpha` enlarges the base once and for all; it does not depend on the length.
"""

from __future__ import annotations

from mvllm.config.model import ModelConfig
from mvllm.config.rope_parameters import RopeParameters, rope_settings, rope_type_of
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
            rope=_rope(config),
        )


def _rope(config: ModelConfig) -> RopeParameters:
    hf, size = config.hf_config, config.head_size
    plain, settings = RopeParameters.from_config(hf, size), rope_settings(hf)
    if rope_type_of(settings) != "dynamic" or not settings.get("alpha"):
        return plain
    theta = plain.theta * float(settings["alpha"]) ** (size / (size - 2))
    return RopeParameters.from_config(hf, size, settings={"rope_type": "default", "rope_theta": theta})

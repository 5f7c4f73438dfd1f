"""GLM-4 in both versions: Llama with interleaved rotary embedding of half of each head; Glm4 adds output norms."""

from __future__ import annotations

from dataclasses import replace

from mvllm.config.model import ModelConfig
from mvllm.config.rope_parameters import RopeParameters
from mvllm.models.llama import LayerNorms, LlamaForCausalLM, LlamaOptions


class GlmForCausalLM(LlamaForCausalLM):
    """`GlmForCausalLM` of Hugging Face checkpoints."""

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """Query, key and value have biases unless the config disables them."""
        hf = config.hf_config
        return LlamaOptions(
            qkv_bias=bool(hf.get("attention_bias", True)),
            fused_gate_up=True,
            eps=hf.positive_number("rms_norm_eps", 1.5625e-7),
            rope=RopeParameters.from_config(hf, config.head_size, partial=0.5),
            interleaved_rotary=True,
        )


class Glm4ForCausalLM(GlmForCausalLM):
    """`Glm4ForCausalLM` of Hugging Face checkpoints."""

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """GLM's options, with norms on the blocks' outputs."""
        norms = LayerNorms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")
        return replace(super().options(config), norms=norms)

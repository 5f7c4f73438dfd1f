"""GLM-4, both forms: Llama with half of each head rotated, in pairs of neighbours; the newer has norms after blocks."""

from __future__ import annotations

from dataclasses import replace

from mvllm.config.model import ModelConfig
from mvllm.config.rope_parameters import RopeParameters
from mvllm.models.llama import LayerNorms, LlamaForCausalLM, LlamaOptions


class GlmForCausalLM(LlamaForCausalLM):
    """`GlmForCausalLM` of Hugging Face checkpoints."""

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """Biases on query, key and value, unless the config says no."""
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
        """The older form's, with norms on what blocks give."""
        norms = LayerNorms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")
        return replace(super().options(config), norms=norms)

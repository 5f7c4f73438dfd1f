"""OLMo 2: Llama with norms after each block instead of before, and norms on queries and keys over all their heads."""

from __future__ import annotations

from mvllm.config.model import ModelConfig
from mvllm.models.llama import LayerNorms, LlamaForCausalLM, LlamaOptions

POST_NORMS = LayerNorms(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)


class Olmo2ForCausalLM(LlamaForCausalLM):
    """`Olmo2ForCausalLM` of Hugging Face checkpoints."""

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """The attention has biases on all its projections or on none."""
        bias = bool(config.hf_config.get("attention_bias", False))
        return LlamaOptions(
            qkv_bias=bias,
            output_bias=bias,
            qk_width_norm=True,
            norms=POST_NORMS,
            eps=config.hf_config.positive_number("rms_norm_eps", 1e-5),
        )

"""ERNIE 4.5, the dense models: Llama with interleaved rotary embedding."""

from __future__ import annotations

from mvllm.config.model import ModelConfig
from mvllm.config.rope_parameters import RopeParameters
from mvllm.models.llama import LlamaForCausalLM, LlamaOptions

_THETA = 500_000.0


class Ernie4_5ForCausalLM(LlamaForCausalLM):
    """`Ernie4_5ForCausalLM` of Hugging Face checkpoints."""

    ties_embeddings_by_default = True

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """Biases come together or not at all."""
        hf = config.hf_config
        bias = bool(hf.get("use_bias", False))
        return LlamaOptions(
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bias,
            eps=hf.positive_number("rms_norm_eps", 1e-5),
            rope=RopeParameters.from_config(hf, config.head_size, theta=_THETA),
            interleaved_rotary=True,
        )

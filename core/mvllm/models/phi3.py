"""Phi-3 and Phi-4: Llama with fused projections in the checkpoint, LongRoPE, partial rotary embedding and a window.

A sequence that starts within the original context keeps the short frequencies of its cached keys when it grows beyond
that context (see RotaryEmbedding); keys are not recomputed.
"""

from __future__ import annotations

from mvllm.config.model import ModelConfig
from mvllm.config.rope_parameters import RopeParameters
from mvllm.models.llama import LlamaForCausalLM, LlamaOptions


class Phi3ForCausalLM(LlamaForCausalLM):
    """`Phi3ForCausalLM` of Hugging Face checkpoints."""

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """No biases; the window, if any, applies to every layer."""
        return LlamaOptions(
            windows=(config.sliding_window,) * config.num_layers,
            fused_qkv=True,
            fused_gate_up=True,
            eps=config.hf_config.positive_number("rms_norm_eps", 1e-5),
            rope=RopeParameters.from_config(config.hf_config, config.head_size, partial=1.0),
        )

"""Phi-3 and Phi-4: Llama with its projections fused in the checkpoint; LongRoPE, part of a head rotated, a window.

Sequences that begin within the original context keep the short frequencies for what they wrote there when they grow
beyond it (see RotaryEmbedding); nothing is computed again.
"""

from __future__ import annotations

from mvllm.config.model import ModelConfig
from mvllm.config.rope_parameters import RopeParameters
from mvllm.models.llama import LlamaForCausalLM, LlamaOptions


class Phi3ForCausalLM(LlamaForCausalLM):
    """`Phi3ForCausalLM` of Hugging Face checkpoints."""

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """No biases; the window, where there is one, counts on every layer."""
        return LlamaOptions(
            windows=(config.sliding_window,) * config.num_layers,
            fused_qkv=True,
            fused_gate_up=True,
            eps=config.hf_config.positive_number("rms_norm_eps", 1e-5),
            rope=RopeParameters.from_config(config.hf_config, config.head_size, partial=1.0),
        )

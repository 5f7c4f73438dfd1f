"""Gemma 3 language model: Gemma 2 with norms on queries and keys instead of soft caps, and two RoPE bases.

Five of six layers have a window and a small RoPE base; the sixth has full attention and a large base.
"""

from __future__ import annotations

from mvllm.config.model import ModelConfig
from mvllm.models.gemma2 import gemma_options, number_or_default
from mvllm.models.layer_ropes import layer_type_ropes
from mvllm.models.layer_windows import layer_windows
from mvllm.models.llama import LlamaForCausalLM, LlamaOptions

_FULL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0


class Gemma3ForCausalLM(LlamaForCausalLM):
    """`Gemma3ForCausalLM` of Hugging Face checkpoints."""

    ties_embeddings_by_default = True

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """The last of every `sliding_window_pattern` layers has no window."""
        pattern = config.hf_config.positive_int("sliding_window_pattern", 6)
        windows = layer_windows(config, lambda layer: (layer + 1) % pattern == 0)
        hf = config.hf_config
        thetas = (
            hf.positive_number("rope_theta", _FULL_THETA),
            hf.positive_number("rope_local_base_freq", _LOCAL_THETA),
        )
        full, local = layer_type_ropes(config, *({"rope_theta": theta} for theta in thetas))
        return LlamaOptions(
            windows,
            qk_norm=True,
            rope=full,
            local_rope=local,
            logits_soft_cap=number_or_default(config, "final_logit_softcapping", None),
            **gemma_options(config),
        )

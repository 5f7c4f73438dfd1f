"""Gemma 3 language model: Gemma 2 with norms on queries and keys instead of soft caps, and two RoPE bases.

Five of six layers have a window and a small RoPE base; the sixth has full attention and a large base.
"""

from __future__ import annotations

from mvllm.config.model import ModelConfig
from mvllm.config.rope_parameters import RopeParameters, is_per_layer_type, rope_settings
from mvllm.models.gemma2 import gemma_options, number_or_default
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
        full, local = _ropes(config)
        return LlamaOptions(
            windows,
            qk_norm=True,
            rope=full,
            local_rope=local,
            logits_soft_cap=number_or_default(config, "final_logit_softcapping", None),
            **gemma_options(config),
        )


def _ropes(config: ModelConfig) -> tuple[RopeParameters, RopeParameters]:
    """RoPE parameters of layers without and with a window. A scaling in the old format applies to those without."""
    hf, settings = config.hf_config, rope_settings(config.hf_config)
    by_type = settings if is_per_layer_type(settings) else {"full_attention": settings}
    thetas = {
        "full_attention": hf.positive_number("rope_theta", _FULL_THETA),
        "sliding_attention": hf.positive_number("rope_local_base_freq", _LOCAL_THETA),
    }
    full, local = (
        RopeParameters.from_config(hf, config.head_size, settings={"rope_theta": theta, **(by_type.get(kind) or {})})
        for kind, theta in thetas.items()
    )
    return full, local

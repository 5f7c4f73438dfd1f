"""OLMo 3: OLMo 2 with a window on three of four layers; a RoPE scaling applies to the layers without one."""

from __future__ import annotations

from dataclasses import replace

from mvllm.config.model import ModelConfig
from mvllm.models.layer_ropes import layer_type_ropes
from mvllm.models.layer_windows import layer_windows
from mvllm.models.llama import LlamaOptions
from mvllm.models.olmo2 import Olmo2ForCausalLM

_THETA = 500_000.0


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """`Olmo3ForCausalLM` of Hugging Face checkpoints."""

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """Without `layer_types`, the last of every four layers has no window."""
        theta = {"rope_theta": config.hf_config.positive_number("rope_theta", _THETA)}
        full, local = layer_type_ropes(config, theta, theta)
        windows = layer_windows(config, lambda layer: (layer + 1) % 4 == 0)
        return replace(super().options(config), windows=windows, rope=full, local_rope=local)

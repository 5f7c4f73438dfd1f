"""Qwen2: Llama with biases on query, key and value, and sliding windows on some layers."""

from __future__ import annotations

from mvllm.config.model import ModelConfig
from mvllm.models import layer_windows as windows
from mvllm.models.llama import LlamaForCausalLM, LlamaOptions


class Qwen2ForCausalLM(LlamaForCausalLM):
    """`Qwen2ForCausalLM` of Hugging Face checkpoints."""

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """Query, key and value have biases."""
        return LlamaOptions(windows=layer_windows(config), qkv_bias=True)


def layer_windows(config: ModelConfig) -> tuple[int | None, ...]:
    """Sliding window of each layer: of those that `layer_types` names, else of all from `max_window_layers` on.

    Raises:
        ModelError: `layer_types` does not fit the model.
    """
    first = config.hf_config.get("max_window_layers", 28)
    return windows.layer_windows(config, lambda layer: bool(layer < first))

"""Qwen2: Llama with biases on query, key and value, and sliding windows on some layers."""

from __future__ import annotations

from mvllm.config.model import ModelConfig
from mvllm.errors import ModelError
from mvllm.models.llama import LlamaForCausalLM, LlamaOptions


class Qwen2ForCausalLM(LlamaForCausalLM):
    """`Qwen2ForCausalLM` of Hugging Face checkpoints."""

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """Query, key and value have biases."""
        return LlamaOptions(windows=layer_windows(config), qkv_bias=True)


def layer_windows(config: ModelConfig) -> tuple[int | None, ...]:
    """Sliding window of each layer: `layer_types` names the layers that have one, else all from `max_window_layers` on.

    Raises:
        ModelError: `layer_types` does not fit the model.
    """
    hf, window = config.hf_config, config.sliding_window
    types = hf.get("layer_types")
    if types is None:
        first = hf.get("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(config.num_layers))
    names = {"full_attention": None, "sliding_attention": window, "attention": None}
    if len(types) != config.num_layers or not set(types) <= names.keys():
        raise ModelError(
            f"{hf.source}: layer_types should name full_attention or sliding_attention for each of the "
            f"{config.num_layers} layers, found {types}."
        )
    return tuple(names[kind] for kind in types)

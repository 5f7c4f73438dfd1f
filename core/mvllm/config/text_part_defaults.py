"""Values that the `text_config` of multimodal checkpoints leaves out, because they are transformers' defaults.

Checkpoints that are language models alone list them.
"""

from __future__ import annotations

from typing import Any

from mvllm.config.hf_config import HFConfig

_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
    },
    "qwen2": {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32_768,
    },
    "gemma3_text": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
    },
    "lfm2": {
        "vocab_size": 65_536,
        "hidden_size": 2560,
        "intermediate_size": 12_288,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128_000,
    },
}
"""By the `model_type` of `text_config`."""

_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "voxtral": {
        "vocab_size": 131_072,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000_000.0,
    },
}
"""By the `model_type` of the whole config: what differs from the defaults of the text model."""

_TEXT_TYPES = {
    "llava": "llama",
    "llava_onevision": "qwen2",
    "gemma3": "gemma3_text",
    "mistral3": "mistral",
    "idefics3": "llama",
    "smolvlm": "llama",
    "internvl": "qwen2",
    "lfm2_vl": "lfm2",
    "qwen2_audio": "qwen2",
    "voxtral": "llama",
}
"""By the `model_type` of the whole config: the `model_type` of a `text_config` that has none."""

_TIED_BY_EITHER = ("llava", "llava_onevision")
"""Families whose head is tied if either the whole config or its `text_config` says so."""


def text_part_values(outer: HFConfig, text: dict[str, Any]) -> dict[str, Any]:
    """The values of `text_config` of a multimodal config, with those that it leaves out.

    Args:
        outer: The whole config.
        text: Its `text_config`.
    """
    family = str(outer.get("model_type"))
    if family not in _TEXT_TYPES:
        return text
    named = {"model_type": _TEXT_TYPES[family], **text}
    return {**_DEFAULTS.get(str(named["model_type"]), {}), **_FAMILY_DEFAULTS.get(family, {}), **named}


def is_tied_by_text(outer: HFConfig, text: dict[str, Any]) -> bool:
    """Whether `text_config` ties the head, whatever the whole config says."""
    return outer.get("model_type") in _TIED_BY_EITHER and text.get("tie_word_embeddings") is True

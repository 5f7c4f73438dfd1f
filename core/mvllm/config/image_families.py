"""Families that generate images: the defaults of their configs, and their token spaces.

Published configs list only the values that differ from transformers' defaults, which the tables here repeat.
"""

from __future__ import annotations

from typing import Any

from mvllm.config.hf_config import HFConfig
from mvllm.config.token_spaces import ReadSpaces, TokenSpace
from mvllm.errors import ModelError

IMAGE = "image"
"""Name of the token space of these families."""

_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}
_EMU3 = {
    "vocab_size": 184622,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 9216,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 151643,
    "bos_token_id": 151849,
    "eos_token_id": 151850,
}
_EMU3_ROPE_THETA = 1e6

TEXT_DEFAULTS: dict[str, dict[str, Any]] = {"janus": _LLAMA, "emu3": _EMU3}
"""Defaults of `text_config`, by the `model_type` of the whole config."""


def text_defaults(outer: HFConfig, text: dict[str, Any]) -> dict[str, Any]:
    """Values that `text_config` leaves out.

    Args:
        outer: The whole config.
        text: Its `text_config`.
    """
    model_type = outer.get("model_type")
    defaults = dict(TEXT_DEFAULTS.get(model_type, {}) if isinstance(model_type, str) else {})
    if model_type == "emu3" and not {"rope_parameters", "rope_theta"} & text.keys():
        defaults["rope_theta"] = _EMU3_ROPE_THETA
    return defaults


def janus_spaces(hf_config: HFConfig, vocab_size: int, generation: HFConfig) -> dict[str, TokenSpace]:
    """The codes of images, behind the vocabulary of text.

    `boi_token_id` and `pad_token_id` of generation_config.json are the token that begins an image, and the one that
    replaces the prompt in the unconditional prompt.
    """
    vq, vision = (HFConfig(hf_config.get(key, {}), f"{hf_config.source}: {key!r}") for key in _JANUS_PARTS)
    begin = _token_id(generation, "boi_token_id", vocab_size)
    if begin is None:
        nested = generation.get("generation_kwargs", {})
        begin = _token_id(HFConfig(nested, generation.source), "boi_token_id", vocab_size)
    pad = _token_id(generation, "pad_token_id", vocab_size)
    return {
        IMAGE: TokenSpace(
            IMAGE,
            first=vocab_size,
            size=vq.positive_int("num_embeddings", 16384),
            num_tokens=vision.positive_int("num_image_tokens", 576),
            begin_token_ids=() if begin is None else (begin,),
            pad_token_id=_token_id(hf_config, "pad_token_id", vocab_size) if pad is None else pad,
        )
    }


_JANUS_PARTS = ("vq_config", "vision_config")


def _token_id(config: HFConfig, key: str, vocab_size: int) -> int | None:
    value = config.get(key)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < vocab_size:
        raise ModelError(f"{config.source}: {key!r} should be a token id below {vocab_size}, found {value!r}.")
    return value


SPACES: dict[str, ReadSpaces] = {"JanusForConditionalGeneration": janus_spaces}
"""Readers of the token spaces, by architecture."""

"""Resolves max_model_len from the model's context length, its RoPE scaling and the user's setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mvllm.config.families import find_model_type
from mvllm.config.hf_config import HFConfig
from mvllm.config.rope_parameters import is_per_layer_type, rope_settings, rope_type_of
from mvllm.errors import ConfigError, ModelError

_LENGTH_KEYS = (
    *("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length"),
    "model_max_length",
)

# These scalings multiply `max_position_embeddings`. With all others (llama3, longrope, ...) the config's
# `max_position_embeddings` is already the extended length.
_SCALED_ROPE_TYPES = ("linear", "dynamic", "yarn")
# Families whose `max_position_embeddings` is the extended length with every scaling.
_UNSCALED_ROPE_TYPES = ("gemma3_text",)
_LARGEST_FACTOR = 1_000_000

_POSITIONS_BEHIND_PADDING = ("roberta", "xlm-roberta")
"""Families whose first position is the padding token's id plus one."""


@dataclass(frozen=True)
class ContextLength:
    """A number of tokens and the reason for it, for messages."""

    num_tokens: int
    reason: str


def resolve_max_model_len(hf_config: HFConfig, requested: int | None) -> int:
    """The longest sequence that the engine accepts, prompt and output together.

    Args:
        requested: The setting max_model_len; None for the model's context length.

    Raises:
        ConfigError: The setting is larger than the model's context length.
        ModelError: The config has no context length, and the setting is None.
    """
    derived = derive_context_length(hf_config)
    if derived is None:
        if requested is None:
            raise ModelError(
                f"{hf_config.source} has none of the keys {', '.join(_LENGTH_KEYS)}, so the context length is not "
                "known. Pass max_model_len."
            )
        return requested
    if requested is None:
        return derived.num_tokens
    if requested > derived.num_tokens:
        raise ConfigError(
            f"max_model_len is {requested}, but the model takes at most {derived.num_tokens} tokens "
            f"({derived.reason} in {hf_config.source}). Lower max_model_len to {derived.num_tokens}, or, if the model "
            "is known to do more, change that key with hf_overrides."
        )
    return requested


def derive_context_length(hf_config: HFConfig) -> ContextLength | None:
    """The context length in the config, or None if it has none.

    Raises:
        ModelError: One of the keys has an invalid value.
    """
    key = next((k for k in _LENGTH_KEYS if k in hf_config), None)
    model_type = str(hf_config.get("model_type"))
    if key is None:
        length = find_model_type(hf_config).context_length
        return None if length is None else ContextLength(length, f"what {model_type} models have by default")
    base = hf_config.positive_int(key)
    unused = first_position(hf_config)
    if unused:
        if base <= unused:
            raise ModelError(f"{hf_config.source}: {key!r} is {base}, of which the first {unused} are never used.")
        return ContextLength(base - unused, f"{key} = {base}, the first {unused} of which are never used,")
    rope = _full_attention(rope_settings(hf_config))
    rope_type = rope_type_of(rope)
    factor = rope.get("factor")
    if rope_type not in _SCALED_ROPE_TYPES or factor is None or model_type in _UNSCALED_ROPE_TYPES:
        return ContextLength(base, f"{key} = {base}")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor <= _LARGEST_FACTOR:
        raise ModelError(
            f"{hf_config.source}: the {rope_type} rope scaling's 'factor' should be >= 1 and <= {_LARGEST_FACTOR}, "
            f"found {factor!r}."
        )
    if rope_type == "yarn":
        # YaRN's factor is relative to the original length; `max_position_embeddings` is the original length in some
        # checkpoints and the extended one in others.
        original = rope.get("original_max_position_embeddings")
        if original is not None:
            key = "original_max_position_embeddings"
            base = HFConfig(rope, f"{hf_config.source}, rope scaling").positive_int(key)
    return ContextLength(int(base * factor), f"{key} = {base} times the {rope_type} rope scaling's factor {factor:g}")


def first_position(hf_config: HFConfig) -> int:
    """Index of the first token's position embedding.

    Raises:
        ModelError: It depends on the padding token, whose id is invalid.
    """
    if hf_config.get("model_type") not in _POSITIONS_BEHIND_PADDING:
        return 0
    padding = hf_config.get("pad_token_id", 1)
    if isinstance(padding, bool) or not isinstance(padding, int) or padding < 0:
        raise ModelError(f"{hf_config.source}: 'pad_token_id' should be a token's id, found {padding!r:.40}.")
    return padding + 1


def _full_attention(settings: dict[str, Any]) -> Mapping[str, Any]:
    """The settings of the full-attention layers, if there are settings per layer type."""
    if is_per_layer_type(settings):
        return settings.get("full_attention") or next(of_type for of_type in settings.values() if of_type is not None)
    return settings

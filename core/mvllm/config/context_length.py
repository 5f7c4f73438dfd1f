"""How long a sequence may be: what the model was built for, stretched by its rotary scaling, cut by the user's wish."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mvllm.config.hf_config import HFConfig
from mvllm.config.rope_parameters import rope_settings, rope_type_of, settings_by_type
from mvllm.errors import ConfigError, ModelError

_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length")

# These scalings stretch `max_position_embeddings`. All others (llama3, longrope, ...) are written into the config
# together with a `max_position_embeddings` that is already the long one.
_SCALED_ROPE_TYPES = ("linear", "dynamic", "yarn")
# Families whose `max_position_embeddings` is the long one under every scaling.
_UNSCALED_ROPE_TYPES = ("gemma3_text",)
# What transformers assumes in families whose first checkpoints came without any of the keys.
_ABSENT_LENGTH = {"falcon": 2048}
_LARGEST_FACTOR = 1_000_000

_POSITIONS_BEHIND_PADDING = ("roberta", "xlm-roberta")
"""Families that count positions from one behind the padding token's id."""


@dataclass(frozen=True)
class ContextLength:
    """A number of tokens and the reason for it, in words."""

    num_tokens: int
    reason: str


def resolve_max_model_len(hf_config: HFConfig, asked: int | None) -> int:
    """The longest sequence that the engine will accept, prompt and output together.

    Args:
        asked: What the user wants, or None for all that the model can do.

    Raises:
        ConfigError: More was asked than the model can do.
        ModelError: The config doesn't say what the model can do, and nothing was asked.
    """
    derived = derive_context_length(hf_config)
    if derived is None:
        if asked is None:
            raise ModelError(
                f"{hf_config.source} has none of the keys {', '.join(_LENGTH_KEYS)}, so the longest sequence is not "
                "known. Pass max_model_len."
            )
        return asked
    if asked is None:
        return derived.num_tokens
    if asked > derived.num_tokens:
        raise ConfigError(
            f"max_model_len is {asked}, but the model takes at most {derived.num_tokens} tokens ({derived.reason} in "
            f"{hf_config.source}). Lower max_model_len to {derived.num_tokens}, or, if the model is known to do more, "
            "change that key with hf_overrides."
        )
    return asked


def derive_context_length(hf_config: HFConfig) -> ContextLength | None:
    """The longest sequence that the config promises, or None where it says nothing.

    Raises:
        ModelError: One of the keys it depends on holds something impossible.
    """
    key = next((k for k in _LENGTH_KEYS if k in hf_config), None)
    model_type = str(hf_config.get("model_type"))
    if key is None:
        length = _ABSENT_LENGTH.get(model_type)
        return None if length is None else ContextLength(length, f"what {model_type} models have by default")
    base = hf_config.positive_int(key)
    taken = first_position(hf_config)
    if taken:
        if base <= taken:
            raise ModelError(f"{hf_config.source}: {key!r} is {base}, of which the first {taken} are never used.")
        return ContextLength(base - taken, f"{key} = {base}, the first {taken} of which are never used,")
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
        # YaRN is stated relative to the length the model was trained for; `max_position_embeddings` beside it is the
        # short length in some checkpoints and the long one in others.
        original = rope.get("original_max_position_embeddings")
        if original is not None:
            key = "original_max_position_embeddings"
            base = HFConfig(rope, f"{hf_config.source}, rope scaling").positive_int(key)
    return ContextLength(int(base * factor), f"{key} = {base} times the {rope_type} rope scaling's factor {factor:g}")


def first_position(hf_config: HFConfig) -> int:
    """The position at which a model's first token stands, in its table of positions.

    Raises:
        ModelError: It depends on the padding token, which is none.
    """
    if hf_config.get("model_type") not in _POSITIONS_BEHIND_PADDING:
        return 0
    padding = hf_config.get("pad_token_id", 1)
    if isinstance(padding, bool) or not isinstance(padding, int) or padding < 0:
        raise ModelError(f"{hf_config.source}: 'pad_token_id' should be a token's id, found {padding!r:.40}.")
    return padding + 1


def _full_attention(settings: dict[str, Any]) -> Mapping[str, Any]:
    """Where each type of layer has settings of its own, those of full attention decide."""
    if settings_by_type(settings):
        return settings.get("full_attention") or next(of_type for of_type in settings.values() if of_type is not None)
    return settings

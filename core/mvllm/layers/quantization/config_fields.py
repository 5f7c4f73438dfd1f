"""Helpers that read fields of a `quantization_config`; errors name the key and the supported values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mvllm.config.hf_config import HFConfig
from mvllm.errors import ModelError

_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head", "lm_head"),
    ("backbone.", "model."),
)
"""Prefixes of names in checkpoints, and in model classes."""
REMEDY = "Use a checkpoint in a supported format, or the unquantized one with quantization='int8'."


def one_of(
    settings: HFConfig,
    keys: Sequence[str],
    permitted: Sequence[Any],
    *,
    default: Any = None,
    fold: bool = False,
) -> Any:
    """The value of the first of `keys` that is present.

    Args:
        permitted: The supported values.
        default: Value of an absent key; None if a key is required.
        fold: Ignore the case of a text.

    Raises:
        ModelError: It has another value; names the key, the value and the supported ones.
    """
    key = next((key for key in keys if key in settings), keys[0])
    value = settings.require(key) if default is None else settings.get(key, default)
    value = value.lower() if fold and isinstance(value, str) else value
    if not any(type(value) is type(option) and value == option for option in permitted):
        supported = " or ".join(repr(option) for option in permitted)
        raise ModelError(f"{settings.source}: {key!r} is {value!r}, but only {supported} is supported. {REMEDY}")
    return value


def group_size(settings: HFConfig, keys: Sequence[str]) -> int | None:
    """Columns that share a scale; None (stored as -1) for one scale per row.

    Raises:
        ModelError: It is neither -1 nor a positive integer.
    """
    key = next((key for key in keys if key in settings), keys[0])
    return None if settings.get(key, -1) == -1 else settings.positive_int(key, at_most=2**31 - 1)


def names(settings: HFConfig, key: str) -> tuple[str, ...]:
    """A list of texts; empty if the key is absent.

    Names of modules in checkpoints for text and images (`model.language_model.layers`, `language_model.model.layers`)
    and of Nemotron-H (`backbone.layers`) are also listed as model classes have them (`model.layers`).

    Raises:
        ModelError: It is not a list of texts.
    """
    value = settings.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ModelError(f"{settings.source}: {key!r} should be a list of texts, found {value!r}.")
    return (
        *value,
        *(ours + item.removeprefix(prefix) for prefix, ours in _PREFIXES for item in value if item.startswith(prefix)),
    )


def pattern(text: str, settings: HFConfig) -> re.Pattern[str]:
    """Compiles a regular expression of a config.

    Raises:
        ModelError: It is not a valid regular expression.
    """
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as e:
        raise ModelError(f"{settings.source}: {text!r} is not a valid regular expression: {e}") from e

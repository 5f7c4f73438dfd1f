"""Reading a `quantization_config`: what is not supported is refused by its key, with what is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mvllm.config.hf_config import HFConfig
from mvllm.errors import ModelError

REMEDY = "Take a checkpoint of this model in a form that is supported, or the unquantized one with quantization='int8'."


def one_of(
    settings: HFConfig,
    keys: Sequence[str],
    permitted: Sequence[Any],
    *,
    default: Any = None,
    fold: bool = False,
) -> Any:
    """The value of the first of `keys` that is there.

    Args:
        permitted: The values that are supported.
        default: What an absent key means; None where it must be there.
        fold: A text may have capital letters.

    Raises:
        ModelError: It is another value; names the key, the value and those that are supported.
    """
    key = next((key for key in keys if key in settings), keys[0])
    value = settings.require(key) if default is None else settings.get(key, default)
    value = value.lower() if fold and isinstance(value, str) else value
    if not any(type(value) is type(option) and value == option for option in permitted):
        supported = " or ".join(repr(option) for option in permitted)
        raise ModelError(f"{settings.source}: {key!r} is {value!r}, but only {supported} is supported. {REMEDY}")
    return value


def group_size(settings: HFConfig, keys: Sequence[str]) -> int | None:
    """Columns that share a scale; None (stored as -1) where a row has one.

    Raises:
        ModelError: It is neither -1 nor a positive integer.
    """
    key = next((key for key in keys if key in settings), keys[0])
    return None if settings.get(key, -1) == -1 else settings.positive_int(key, at_most=2**31 - 1)


def names(settings: HFConfig, key: str) -> tuple[str, ...]:
    """A list of texts; empty where the key is absent.

    Raises:
        ModelError: It is something else.
    """
    value = settings.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ModelError(f"{settings.source}: {key!r} should be a list of texts, found {value!r}.")
    return tuple(value)


def pattern(text: str, settings: HFConfig) -> re.Pattern[str]:
    """A regular expression out of a config.

    Raises:
        ModelError: It is none.
    """
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as e:
        raise ModelError(f"{settings.source}: {text!r} is no regular expression: {e}") from e

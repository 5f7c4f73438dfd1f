"""Checks of the fields of one request."""

from __future__ import annotations

import math
import operator
from typing import Any

from mvllm.config.model import ModelConfig
from mvllm.errors import RequestError
from mvllm.messages.field_checks import describe_value, is_unicode

MAX_CACHE_SALT_LENGTH = 256


def check_generates(model: ModelConfig) -> None:
    """Checks that the model generates.

    Raises:
        RequestError: It does not.
    """
    if model.kind.lacks_head:
        raise RequestError(
            f"The model {model.model} makes embeddings of prompts; it generates nothing: its checkpoint has no "
            "language-model head (lm_head), and by config.json (tie_word_embeddings is false) the token embedding is "
            "not the head. To generate, use a checkpoint with the head.",
            parameter="model",
        )
    if not model.kind.generates:
        task = "classifies prompts" if model.kind.num_labels else "makes embeddings of prompts"
        raise RequestError(
            f"The model {model.model} ({model.architecture}) {task}; it generates nothing.", parameter="model"
        )


def as_token_id(value: Any, position: int) -> int:
    """`value` as an int.

    Raises:
        RequestError: It is none.
    """
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise RequestError(
        f"Token ids must be integers; found {describe_value(value)} at position {position} of the prompt.",
        parameter="prompt",
    )


def check_cache_salt(salt: object) -> str | None:
    """The salt.

    Raises:
        RequestError: It is not a short printable text.
    """
    if salt is None:
        return None
    if not isinstance(salt, str) or not 0 < len(salt) <= MAX_CACHE_SALT_LENGTH or not salt.isprintable():
        raise RequestError(
            f"cache_salt must be a text of 1 to {MAX_CACHE_SALT_LENGTH} printable characters; found "
            f"{describe_value(salt)}.",
            parameter="cache_salt",
        )
    return salt


def check_request_id(request_id: object) -> str:
    """The id.

    Raises:
        RequestError: It is not a text that can be sent.
    """
    if not isinstance(request_id, str) or not request_id:
        raise RequestError(
            f"request_id must be a non-empty text; found {describe_value(request_id)}.", parameter="request_id"
        )
    if not is_unicode(request_id):  # could not be sent to the engine core
        raise RequestError(
            f"request_id must be valid Unicode, without lone surrogates; found {describe_value(request_id)}.",
            parameter="request_id",
        )
    return request_id


def check_arrival_time(seconds: object) -> float:
    """The time as a float.

    Raises:
        RequestError: It is not a finite number.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not math.isfinite(seconds):
        raise RequestError(
            f"arrival_time must be a finite number of seconds; found {describe_value(seconds)}.",
            parameter="arrival_time",
        )
    return float(seconds)

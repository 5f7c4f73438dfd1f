"""Checks of the fields of one request."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

from mvllm.config.model import ModelConfig
from mvllm.errors import RequestError
from mvllm.logging import get_logger
from mvllm.messages.field_checks import describe_value, is_unicode

logger = get_logger(__name__)

MAX_CACHE_SALT_LENGTH = 256
_PRIORITY_LIMIT = 2**31


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


def check_priority(priority: object, *, is_used: bool) -> int:
    """The priority of a request; 0, with one line in the log, if the engine has no priorities.

    Args:
        is_used: Whether the scheduling policy is `priority`.

    Raises:
        RequestError: It is no integer, or too large.
    """
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > _PRIORITY_LIMIT:
        raise RequestError(f"priority must be an integer; found {describe_value(priority)}.", parameter="priority")
    if priority != 0 and not is_used:
        _warn_of_ignored_priority()
        return 0
    return priority


@functools.cache
def _warn_of_ignored_priority() -> None:
    logger.warning(
        "Ignoring the priority of requests: the engine serves them in the order of arrival. Start it with "
        "scheduling_policy='priority'. Logged once."
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

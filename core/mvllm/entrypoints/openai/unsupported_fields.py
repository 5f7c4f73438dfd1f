"""Rejects requests with fields that are known and not supported."""

from __future__ import annotations

import functools
from typing import get_args

import msgspec

from mvllm.entrypoints.openai.client_request import ModelRequest, Unsupported
from mvllm.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    GenerationRequest,
    InputListRequest,
    TextPairRequest,
)
from mvllm.errors import RequestError


def reject_unsupported_fields(request: ModelRequest) -> None:
    """Checks that a request has no unsupported fields.

    Raises:
        RequestError: It has one. The message names the field and the reason.
    """
    for name, unsupported in unsupported_fields(type(request)).items():
        if unsupported.refuses(getattr(request, name)):
            raise RequestError(f"{name} is not supported: {unsupported.reason}.", parameter=name)
    _check_truncation_side(request)
    if not isinstance(request, GenerationRequest):
        return
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream to be true.", parameter="stream_options")
    if isinstance(request, ChatCompletionRequest) and set(request.modalities or ()) - {"text"}:
        raise RequestError("modalities must be ['text']: the server generates only text.", parameter="modalities")


@functools.cache
def unsupported_fields(kind: type[msgspec.Struct]) -> dict[str, Unsupported]:
    """The fields of a struct that are refused, by name."""
    found = ((field.name, get_args(field.type)) for field in msgspec.structs.fields(kind))
    return {name: each for name, types in found for each in types if isinstance(each, Unsupported)}


def _check_truncation_side(request: ModelRequest) -> None:
    """Prompts keep their last tokens, so that the output follows them; texts for pooling keep their first ones."""
    if not isinstance(request, GenerationRequest | InputListRequest | TextPairRequest):
        return
    side, done = request.truncation_side, "left" if isinstance(request, GenerationRequest) else "right"
    if side not in (None, "left", "right"):
        raise RequestError("truncation_side must be 'left' or 'right'.", parameter="truncation_side")
    if side not in (None, done) and request.truncate_prompt_tokens is not None:
        kept = "last" if done == "left" else "first"
        raise RequestError(
            f"truncation_side {side!r} is not supported here: truncate_prompt_tokens keeps the {kept} tokens. Send "
            f"{done!r}, or a shorter text.",
            parameter="truncation_side",
        )

"""Rejects requests with fields that are known and not supported."""

from __future__ import annotations

from mvllm.entrypoints.openai.client_request import ModelRequest
from mvllm.entrypoints.openai.foreign_fields import FOREIGN_FIELDS, UNSUPPORTED_FIELDS
from mvllm.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    GenerationRequest,
    InputListRequest,
    TextPairRequest,
)
from mvllm.errors import RequestError

_UNSUPPORTED = {
    "logits_processors": "the server runs no code from requests; start it with --logits-processors",
    "suffix": "fill-in-the-middle is not implemented; send only prompt",
    "functions": "it is deprecated; send tools",
    "function_call": "it is deprecated; send tool_choice",
    "documents": "put them into a message",
    "audio": "the server generates only text; omit the field",
}
"""Unsupported fields, with the reason or an alternative. Null and empty values are accepted."""


def reject_unsupported_fields(request: ModelRequest) -> None:
    """Checks that a request has no unsupported fields.

    Raises:
        RequestError: It has one. The message names the field and the reason.
    """
    for kind, names in FOREIGN_FIELDS.items():
        if isinstance(request, kind):
            for name in names:
                if UNSUPPORTED_FIELDS[name].is_refused(getattr(request, name)):
                    raise RequestError(f"{name} is not supported: {UNSUPPORTED_FIELDS[name].reason}.", parameter=name)
    _check_truncation_side(request)
    if not isinstance(request, GenerationRequest):
        return  # other request types support fields with these names
    for name, reason in _UNSUPPORTED.items():
        if getattr(request, name, None) not in (None, "", [], {}, False, "none"):
            raise RequestError(f"{name} is not supported: {reason}.", parameter=name)
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream to be true.", parameter="stream_options")
    if isinstance(request, ChatCompletionRequest) and set(request.modalities or ()) - {"text"}:
        raise RequestError("modalities must be ['text']: the server generates only text.", parameter="modalities")


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

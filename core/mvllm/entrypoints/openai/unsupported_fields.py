"""Rejects requests with fields that are known and not supported."""

from __future__ import annotations

from mvllm.entrypoints.openai.client_request import ModelRequest
from mvllm.entrypoints.openai.foreign_fields import FOREIGN_FIELDS, UNSUPPORTED_FIELDS
from mvllm.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    GenerationRequest,
    InputListRequest,
    ResponsesRequest,
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
    "context_management": "send truncation='auto', or shorten the input",
    "moderation": "the server has no moderation; omit the field",
}
"""Unsupported fields, with the reason or an alternative. Null and empty values are accepted."""

_INCLUDES = frozenset(
    {
        "message.output_text.logprobs",
        "reasoning.encrypted_content",
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    }
)
"""Values of `include`. All but the first have no effect: reasoning is always sent as plain text, and the server has no
items of the other kinds."""

_MAX_TOP_LOGPROBS = 20


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
    if not isinstance(request, GenerationRequest | ResponsesRequest):
        return  # other request types support fields with these names
    for name, reason in _UNSUPPORTED.items():
        if getattr(request, name, None) not in (None, "", [], {}, False, "none"):
            raise RequestError(f"{name} is not supported: {reason}.", parameter=name)
    if isinstance(request, GenerationRequest) and request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream to be true.", parameter="stream_options")
    if isinstance(request, ResponsesRequest):
        _reject_unsupported_of_responses(request)
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


def _reject_unsupported_of_responses(request: ResponsesRequest) -> None:
    if request.prompt:
        raise RequestError(
            "prompt is not supported: the server stores no prompt templates; send input.", parameter="prompt"
        )
    unknown = [name for name in request.include or () if name not in _INCLUDES]
    if unknown:
        raise RequestError(
            f"include: {ascii(unknown[0])[:60]} is not supported; allowed are {', '.join(sorted(_INCLUDES))}.",
            parameter="include",
        )
    if not 0 <= (request.top_logprobs or 0) <= _MAX_TOP_LOGPROBS:
        raise RequestError(f"top_logprobs must be from 0 to {_MAX_TOP_LOGPROBS}.", parameter="top_logprobs")
    if request.truncation not in (None, "auto", "disabled"):
        raise RequestError("truncation must be 'auto' or 'disabled'.", parameter="truncation")

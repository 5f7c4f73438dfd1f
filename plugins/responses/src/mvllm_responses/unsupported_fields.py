"""Rejects requests for responses with fields that are known and not supported."""

from __future__ import annotations

from mvllm.extension_api import RequestError
from mvllm_responses.protocol import ResponsesRequest

_UNSUPPORTED = {
    "enable_response_messages": "POST /tokenize shows the prompt of a conversation",
    "previous_input_messages": "send the earlier items as input, or previous_response_id",
    "previous_response": "send its output items as input, or previous_response_id",
    "media_io_kwargs": "send mm_processor_kwargs, such as num_frames or fps",
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


def reject_unsupported_fields(request: ResponsesRequest) -> None:
    """Checks that a request has no unsupported fields.

    Raises:
        RequestError: It has one. The message names the field and the reason.
    """
    for name, reason in _UNSUPPORTED.items():
        if getattr(request, name) not in (None, "", [], {}, False, "none"):
            raise RequestError(f"{name} is not supported: {reason}.", parameter=name)
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

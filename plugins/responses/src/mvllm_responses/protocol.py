"""Request bodies: fields of OpenAI's Responses API, and those that vLLM and similar engines have added.

As in core's bodies, every field may be null, as if it had not been sent.
"""

from __future__ import annotations

from typing import Any

import msgspec

from mvllm.extension_api.http import ClientRequest, ModelRequest


class ForeignResponsesFields(ClientRequest, kw_only=True):
    """Fields of other engines that would change the result and are not done here."""

    enable_response_messages: Any = None
    previous_input_messages: Any = None
    previous_response: Any = None
    media_io_kwargs: Any = None


class ResponsesStreamOptions(msgspec.Struct, kw_only=True):
    """Options of a response's stream, without effect: events are not padded."""

    include_obfuscation: bool | None = None


class ResponsesRequest(ForeignResponsesFields, kw_only=True):
    """Body of `POST /v1/responses`.

    Attributes:
        input: A text, or a list of items: messages, reasoning, function calls and their outputs.
        instructions: A system message at the beginning; not stored for later turns.
        previous_response_id: Continue the conversation that ended with this response.
        store: Whether to store the response, so that it can be read and continued later.
        background: Answer at once, and generate the response without a client.
        conversation: A conversation, or its id: its items come before the input, and it gets input and output.
        include: Further contents of the response; of these there are the log-probabilities of the text.
        max_tool_calls: Most calls of tool servers.
        top_logprobs: Alternatives to report for each token of the text.
        truncation: `auto` leaves out the oldest messages of a conversation that is too long, `disabled` refuses it.
        cache_salt: By default that of the previous response.
    """

    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    background: bool | None = None
    conversation: str | dict[str, Any] | None = None
    include: list[str] | None = None
    max_tool_calls: int | None = None
    top_logprobs: int | None = None
    truncation: str | None = None

    # Fields of other engines, as in GenerationRequest.
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    vllm_xargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    structured_outputs: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None

    # No effect.
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None

    # Unsupported.
    prompt: dict[str, Any] | None = None
    context_management: list[dict[str, Any]] | None = None
    moderation: dict[str, Any] | None = None


class ConversationRequest(ModelRequest, kw_only=True):
    """Body of `POST /v1/conversations`.

    Attributes:
        items: The first items.
        metadata: Names and texts of the client.
    """

    items: list[dict[str, Any]] | None = None
    metadata: dict[str, str] | None = None


class ConversationUpdateRequest(ModelRequest, kw_only=True):
    """Body of `POST /v1/conversations/{id}`."""

    metadata: dict[str, str] | None = None


class CompletionUpdateRequest(ModelRequest, kw_only=True):
    """Body of `POST /v1/chat/completions/{id}`."""

    metadata: dict[str, str] | None = None


class ConversationItemsRequest(ModelRequest, kw_only=True):
    """Body of `POST /v1/conversations/{id}/items`."""

    items: list[dict[str, Any]] | None = None

"""Bodies of responses, for the description of the API. `NotRequired` fields are sent only where they apply."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from mvllm.extension_api.http import ChatLogprobs, ChatTokenLogprob, MessageToolCall, Usage


class ResponseItem(TypedDict):
    """An item: a message, reasoning, a call or what concerns tool servers. Its type says which fields it has; those of
    input items are the client's."""

    id: str
    type: str
    status: NotRequired[str | None]
    role: NotRequired[str]
    content: NotRequired[list[dict[str, Any]] | None]
    summary: NotRequired[list[dict[str, Any]]]
    call_id: NotRequired[str]
    name: NotRequired[str]
    namespace: NotRequired[str]
    arguments: NotRequired[str]
    output: NotRequired[Any]
    server_label: NotRequired[str]
    tools: NotRequired[list[dict[str, Any]]]
    error: NotRequired[Any]
    approval_request_id: NotRequired[str | None]
    approve: NotRequired[bool]


class CachedTokens(TypedDict):
    """What input tokens have to do with the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int


class ReasoningTokens(TypedDict):
    """What output tokens were used for."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """The tokens of all turns of a response."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseError(TypedDict):
    """Why a response has failed."""

    code: str
    message: str


class IncompleteDetails(TypedDict):
    """Why a response is incomplete."""

    reason: str


class ConversationReference(TypedDict):
    """The conversation that gets the items of a response."""

    id: str


class ReasoningSettings(TypedDict):
    """How the model reasons."""

    effort: str | None
    summary: None


class TextSettings(TypedDict):
    """The format of the text."""

    format: dict[str, Any]


class ResponsesResponse(TypedDict):
    """A response: its output so far, and the settings of its request."""

    id: str
    object: Literal["response"]
    created_at: int
    status: str
    background: bool
    completed_at: int | None
    conversation: ConversationReference | None
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[ResponseItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningSettings
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    text: TextSettings
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    truncation: str
    usage: ResponseUsage | None
    user: str | None
    warnings: NotRequired[list[str]]


class ResponseStreamEvent(TypedDict):
    """An event of a streamed response. Its type says which fields it has."""

    type: str
    sequence_number: int
    response: NotRequired[ResponsesResponse]
    item: NotRequired[ResponseItem]
    item_id: NotRequired[str]
    output_index: NotRequired[int]
    content_index: NotRequired[int]
    part: NotRequired[dict[str, Any]]
    delta: NotRequired[str]
    text: NotRequired[str]
    logprobs: NotRequired[list[ChatTokenLogprob]]
    name: NotRequired[str]
    arguments: NotRequired[str]


class InputTokens(TypedDict):
    """The tokens of a response's input."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedObject(TypedDict):
    """What has been deleted."""

    id: str
    object: str
    deleted: bool


class ItemPage(TypedDict):
    """A page of items."""

    object: Literal["list"]
    data: list[ResponseItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Conversation(TypedDict):
    """A conversation, without its items."""

    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class StoredMessage(TypedDict):
    """A message of a stored completion. Fields of other messages are the client's."""

    role: Literal["assistant"]
    content: str | None
    refusal: NotRequired[None]
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[MessageToolCall]]


class StoredChoice(TypedDict):
    """A choice of a stored completion."""

    index: int
    message: StoredMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int] | None]
    conditional_logprobs: NotRequired[list[float]]
    weight_versions: NotRequired[list[list[int]] | None]


class StoredChatCompletion(TypedDict):
    """A stored chat completion. One that was streamed has fewer fields."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[StoredChoice]
    usage: Usage
    metadata: dict[str, str]
    service_tier: NotRequired[str | None]
    system_fingerprint: NotRequired[str | None]
    kv_transfer_params: NotRequired[dict[str, Any] | None]
    prompt_logprobs: NotRequired[list[dict[str, Any] | None] | None]
    prompt_token_ids: NotRequired[list[int] | None]
    prompt_text: NotRequired[str | None]
    warnings: NotRequired[list[str]]


class StoredChatCompletionPage(TypedDict):
    """A page of stored chat completions."""

    object: Literal["list"]
    data: list[StoredChatCompletion]
    first_id: str | None
    last_id: str | None
    has_more: bool


class RequestMessage(TypedDict):
    """A message of a stored request; further fields are the client's."""

    id: str
    role: NotRequired[str]
    content: str | None
    content_parts: list[dict[str, Any] | str] | None


class MessagePage(TypedDict):
    """A page of messages."""

    object: Literal["list"]
    data: list[RequestMessage]
    first_id: str | None
    last_id: str | None
    has_more: bool

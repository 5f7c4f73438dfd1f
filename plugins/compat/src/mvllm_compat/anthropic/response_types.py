"""Bodies of responses, for the description of the API. `NotRequired` fields are sent only where they apply."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict


class AnthropicModel(TypedDict):
    """A name that requests may use, for requests with the header `anthropic-version`."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int | None
    max_tokens: int | None


class AnthropicModelList(TypedDict):
    """The names of the model and of LoRA adapters, for requests with the header `anthropic-version`."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str
    last_id: str


class ContentBlock(TypedDict):
    """A block of a message: `text`, `thinking` or `tool_use`."""

    type: Literal["text", "thinking", "tool_use"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    id: NotRequired[str]
    name: NotRequired[str]
    input: NotRequired[dict[str, Any]]


class MessageUsage(TypedDict):
    """The tokens of a message. Those of the prompt are the sum of the three numbers of inputs."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Message(TypedDict):
    """The next message of a conversation."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    warnings: NotRequired[list[str]]


class MessageStreamEvent(TypedDict):
    """An event of a streamed message. Its type says which fields it has."""

    type: str
    message: NotRequired[Message]
    index: NotRequired[int]
    content_block: NotRequired[ContentBlock]
    delta: NotRequired[dict[str, Any]]
    usage: NotRequired[MessageUsage]
    warnings: NotRequired[list[str]]


class MessageTokensCount(TypedDict):
    """The tokens of a conversation's prompt."""

    input_tokens: int

"""Request bodies of the Anthropic Messages API. Fields may be null, as if they had not been sent."""

from __future__ import annotations

from typing import Any

from mvllm.extension_api.http import ModelRequest


class ConversationRequest(ModelRequest, kw_only=True):
    """A conversation: what the number of its tokens depends on.

    Attributes:
        messages: Messages with the role `user`, `assistant` or `system`, whose content is a text or a list of blocks.
        system: The system prompt: a text, or a list of text blocks.
        tools: Tools that the client runs, with `name`, `description` and `input_schema`.
        thinking: Whether the model thinks before it answers; it does not without this field.
        output_config: `effort` of the thinking, and `format` of the answer.
        output_format: `output_config.format` of older clients.
        chat_template_kwargs: More variables for the chat template.
    """

    messages: list[dict[str, Any]] | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # Without effect: labels, and settings of a service with several tiers. The prefix cache needs no marks, and
    # nothing is removed from a conversation.
    cache_control: Any = None
    context_management: Any = None
    metadata: Any = None
    service_tier: Any = None
    inference_geo: Any = None
    speed: Any = None
    diagnostics: Any = None
    betas: Any = None
    anthropic_version: Any = None
    anthropic_beta: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None

    # Unsupported.
    mcp_servers: Any = None
    container: Any = None


class CountTokensRequest(ConversationRequest, kw_only=True):
    """Body of `POST /v1/messages/count_tokens`."""


class MessagesRequest(ConversationRequest, kw_only=True):
    """Body of `POST /v1/messages`.

    Attributes:
        max_tokens: Most tokens of the answer, its thinking included. Required.
        stop_sequences: Texts that end the answer, which does not contain them.
    """

    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    # Fields of this engine, as in GenerationRequest.
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None


SHARED_FIELDS = (
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "max_tokens",
    "priority",
    "cache_salt",
)
"""Fields of `MessagesRequest` that chat completion requests have under the same name."""

"""Leaves out the oldest messages of a conversation that is too long for the model."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from mvllm.engine.async_llm import AsyncLLM
from mvllm.entrypoints.openai.common.serving_context import ServingContext
from mvllm.entrypoints.openai.protocol import ChatCompletionRequest
from mvllm.errors import RequestError
from mvllm.messages.inputs import PromptType


def is_too_long(error: RequestError) -> bool:
    """Whether a prompt was refused because the context cannot hold it."""
    return "max_model_len" in str(error)


def num_prompt_tokens(prompt: PromptType) -> int:
    """The tokens of a prompt that has token ids; 0 for a text."""
    return len(cast(Any, prompt).get("prompt_token_ids") or ()) if isinstance(prompt, dict) else 0


def max_truncated_length(request: ChatCompletionRequest, engine: AsyncLLM) -> int:
    """Tokens of a truncated prompt, at most: an eighth of the context, or `max_tokens` up to a quarter, is left."""
    limit: int = engine.model_config.max_model_len
    return limit - (min(request.max_tokens or limit // 8, limit // 4) or 1)


async def without_oldest_messages(
    request: ChatCompletionRequest, context: ServingContext, max_tokens: int
) -> ChatCompletionRequest:
    """The request without the oldest messages, so that its prompt has at most `max_tokens` tokens.

    The system messages at the beginning stay. The others are left out up to a message of the user, so that no output of
    a tool is without its call; the last message of the user stays, even if it is too long.
    """
    messages = request.messages or []
    num_system = next((i for i, each in enumerate(messages) if each["role"] != "system"), len(messages))
    starts = [i for i in range(num_system + 1, len(messages)) if messages[i]["role"] == "user"]
    lengths = [num_system, *starts]  # where the rest may begin

    async def fits(first: int) -> bool:
        shorter = msgspec.structs.replace(request, messages=[*messages[:num_system], *messages[first:]])
        try:
            return len((await context.prompt_renderer.render(shorter))["prompt_token_ids"]) <= max_tokens
        except RequestError as e:
            if is_too_long(e):
                return False
            raise

    low, high = 0, len(lengths) - 1
    while low < high:  # the first that fits
        middle = (low + high) // 2
        if await fits(lengths[middle]):
            high = middle
        else:
            low = middle + 1
    return msgspec.structs.replace(request, messages=[*messages[:num_system], *messages[lengths[low] :]])

"""`POST /v1/messages`: the assistant's next message, as a list of content blocks.

A message is a chat completion in another format: the request is converted to a chat completion request, and the deltas
of the same parsers become blocks and events.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, TypeVar, cast

from mvllm.extension_api import APIError, Delta, RequestOutput, SamplingParams
from mvllm.extension_api.http import (
    Conversation,
    PromptType,
    RequestHandler,
    ServingContext,
    TokensPrompt,
    UsageCounter,
    encode_json,
    renamed_fields,
    to_api_error,
)
from mvllm_compat.anthropic.api_format import AnthropicFormat
from mvllm_compat.anthropic.content_blocks import ContentBlocks, encode_event
from mvllm_compat.anthropic.input_messages import CHAT_TO_MESSAGES_FIELDS, to_chat_request
from mvllm_compat.anthropic.protocol import MessagesRequest

T = TypeVar("T")

PING_SECONDS = 10.0
"""Seconds without an event after which a stream has a ping, so that clients and proxies keep the connection."""

_PING = encode_event("ping")


class MessagesHandler(RequestHandler):
    """Answers one request of the Messages API.

    Args:
        context, model: As for RequestHandler.
        request: The body of the HTTP request.

    Raises:
        RequestError: On construction: a field is not valid.
    """

    def __init__(self, context: ServingContext, model: str, request: MessagesRequest) -> None:
        with renamed_fields(CHAT_TO_MESSAGES_FIELDS):
            chat = to_chat_request(request)
            # Agents send a budget to every model, also to those without tags of thoughts.
            self._conversation = Conversation(context, chat, requires_thinking_tags=False)
        super().__init__(context, model, "msg_", chat.priority, self._conversation.constraint)
        self.is_streaming = bool(chat.stream)
        self._usage = UsageCounter()
        self._content = ContentBlocks()
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None
        self._num_prompt_tokens = 0

    async def start(self) -> None:
        """Adds the prompt to the engine. See Handler."""
        with renamed_fields(CHAT_TO_MESSAGES_FIELDS):
            await super().start()

    async def _build_engine_inputs(self) -> tuple[Sequence[PromptType], SamplingParams]:
        [prompt] = await self._conversation.build_prompts()
        self._num_prompt_tokens = len(cast(TokensPrompt, prompt)["prompt_token_ids"])
        return [prompt], self._conversation.params

    async def full_response(self) -> bytes:
        """The body of the response. See Handler."""
        async with contextlib.aclosing(self._read_deltas()) as outputs:
            async for output, deltas in outputs:
                self._content.append(deltas)
                self._note_stop(output)
        self._content.finish()
        message = self._message(self._content.blocks, self._message_usage())
        return encode_json({**message, **self.warning_fields})

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The response as server-sent events. See Handler."""
        # How much of the prompt is cached, the last event says.
        usage = {**self._message_usage(), "input_tokens": self._num_prompt_tokens}
        yield encode_event("message_start", message=self._message([], usage)) + _PING
        last_event = time.monotonic()
        written = b""
        try:
            async with contextlib.aclosing(_none_while_waiting(self._read_deltas(), PING_SECONDS)) as outputs:
                async for item in outputs:
                    if item is not None:
                        output, deltas = item
                        written += self._content.append(deltas)
                        self._note_stop(output)
                    if self._stop_reason is not None:  # the last events are sent with the stream's end
                        continue
                    now = time.monotonic()
                    if not written and now - last_event >= PING_SECONDS:
                        written = _PING
                    if written:
                        yield written
                        written, last_event = b"", now
        except Exception as e:  # noqa: BLE001  (to_api_error logs what the client does not see)
            yield written + AnthropicFormat().error_event(to_api_error(e))
            return
        written += self._content.finish()
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        end = {"delta": delta, "usage": self._message_usage(), **self.warning_fields}
        written += encode_event("message_delta", **end)
        yield written + encode_event("message_stop")

    def _read_deltas(self) -> AsyncGenerator[tuple[RequestOutput, list[Delta]], None]:
        return self._conversation.read_deltas(self._engine_requests, self._usage)

    def _message_usage(self) -> dict[str, Any]:
        """The tokens so far. The counts of the prompt's tokens add up to its length."""
        usage = self._usage
        return {
            "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.num_cached_tokens,
            "output_tokens": usage.num_completion_tokens,
        }

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": usage,
        }

    def _note_stop(self, output: RequestOutput) -> None:
        """Remembers why the message has ended, if it has.

        Raises:
            APIError: It was aborted (503).
        """
        for sequence in output.outputs:  # there is one
            reason = sequence.finish_reason
            if reason is None:
                continue
            if reason == "abort":
                raise APIError(503, "The request was aborted; try again.", code="aborted", retry_after=1)
            if reason == "length":
                limit = self._conversation.params.max_tokens
                is_limit = limit is not None and self._usage.num_completion_tokens >= limit
                self._stop_reason = "max_tokens" if is_limit else "model_context_window_exceeded"
            elif self._content.num_calls:
                self._stop_reason = "tool_use"
            elif isinstance(sequence.stop_reason, str):
                self._stop_reason, self._stop_sequence = "stop_sequence", sequence.stop_reason
            else:
                self._stop_reason = "end_turn"


async def _none_while_waiting(items: AsyncGenerator[T, None], seconds: float) -> AsyncGenerator[T | None, None]:
    """The items, and None for every `seconds` in which the first one has not come. A prompt may wait for long."""

    async def read_first() -> list[T]:
        async for item in items:
            return [item]
        return []

    async with contextlib.aclosing(items):
        first = asyncio.create_task(read_first())
        try:
            while not (await asyncio.wait([first], timeout=seconds))[0]:
                yield None
            for item in first.result():
                yield item
        finally:
            first.cancel()
            await asyncio.wait([first])  # `items` is not being read any more, and can be closed
        async for item in items:
            yield item

"""`POST /v1/responses`: the next response of a conversation, as a list of items.

A response is a chat completion in another format. The request is converted to a chat completion request, so the model
gets the same prompt and generates the same tokens. The same parsers read its output, and their deltas become items and
events.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from mvllm.entrypoints.openai.chat.serving_base import ChatHandler, renamed_fields
from mvllm.entrypoints.openai.common.errors import to_api_error
from mvllm.entrypoints.openai.common.json_response import encode_json
from mvllm.entrypoints.openai.common.serving_context import ServingContext
from mvllm.entrypoints.openai.protocol import ResponsesRequest
from mvllm.entrypoints.openai.responses.input_items import (
    CHAT_TO_RESPONSES_FIELDS,
    input_messages,
    items_to_messages,
    to_chat_request,
)
from mvllm.entrypoints.openai.responses.output_items import OutputItems, ResponseEventEncoder
from mvllm.entrypoints.openai.responses.store import ResponseStore, StoredResponse
from mvllm.entrypoints.openai.server.authentication import Caller

_STATUS = {"stop": "completed", "length": "incomplete", "abort": "cancelled"}
_LAST_EVENT = {"completed": "completed", "failed": "failed"}
"""The stream's last event by status; `incomplete` for any other status."""


class ResponsesHandler(ChatHandler):
    """Answers one request of the Responses API.

    Args:
        context, model: As for RequestHandler.
        request: The body of the HTTP request.
        store: Stores this response, and has the previous one.
        caller: The sender of the request.

    Raises:
        RequestError: On construction: a field is not valid.
        APIError: The previous response is not known.
    """

    field_names = CHAT_TO_RESPONSES_FIELDS

    def __init__(
        self,
        context: ServingContext,
        model: str,
        request: ResponsesRequest,
        store: ResponseStore,
        caller: Caller,
    ) -> None:
        self._response_request = request
        self._store = store
        self._caller = caller
        previous_id = request.previous_response_id
        with renamed_fields(self.field_names):
            self._messages = [*store.conversation(previous_id, caller), *input_messages(request.input)]
            if request.cache_salt is None:  # a conversation keeps its salt
                salt = store.cache_salt(previous_id, caller)
                request = msgspec.structs.replace(request, cache_salt=salt)
            super().__init__(context, model, "resp_", to_chat_request(request, self._messages))
        self._is_stored = request.store is not False and store.is_enabled
        self._events = ResponseEventEncoder()
        self._items = OutputItems(self._events)
        self._status = "in_progress"
        self._error: dict[str, Any] | None = None
        self._usage_json: dict[str, Any] | None = None

    async def start(self) -> None:
        """Adds the prompt to the engine. See RequestHandler."""
        await super().start()
        if self._is_stored:
            self._store.add_running(self._id, self, self._caller)

    def close(self) -> None:
        """Aborts what has not finished. Idempotent."""
        self._store.finish(self._id)
        super().close()

    def cancel(self) -> None:
        """Aborts the request. Its response ends with the items generated so far."""
        self._status = "cancelled"
        super().close()

    async def full_response(self) -> bytes:
        """The body of the response. See RequestHandler."""
        with renamed_fields(self.field_names):
            async for _ in self._events_of_output():
                pass
        return self.snapshot()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The response as server-sent events. See GenerationHandler."""
        opening = b'"response":' + self.snapshot()
        write = self._events.encode_raw
        yield write("response.created", opening) + write("response.in_progress", opening)
        written = b""
        try:
            async with contextlib.aclosing(self._events_of_output()) as events:
                async for event in events:
                    written += event
                    if self._status == "in_progress":  # the last events are sent with the stream's end
                        yield written
                        written = b""
        except Exception as e:  # noqa: BLE001  (to_api_error logs it)
            error = to_api_error(e)
            self._status = "failed"
            code = "invalid_prompt" if error.status < 500 else "server_error"
            self._error = {"code": code, "message": error.message}
            written += self._items.finish("incomplete")
            self._store_response()
        last = _LAST_EVENT.get(self._status, "incomplete")
        yield written + write(f"response.{last}", b'"response":' + self.snapshot())

    def snapshot(self) -> bytes:
        """The response as it is now."""
        request = self._response_request
        return encode_json(
            {
                "id": self._id,
                "object": "response",
                "created_at": self._created,
                "status": self._status,
                "background": False,
                "error": self._error,
                "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
                "instructions": request.instructions,
                "max_output_tokens": request.max_output_tokens,
                "max_tool_calls": request.max_tool_calls,
                "metadata": request.metadata or {},
                "model": self._model,
                "output": self._items.items,
                "parallel_tool_calls": request.parallel_tool_calls is not False,
                "previous_response_id": request.previous_response_id,
                "prompt_cache_key": request.prompt_cache_key,
                "reasoning": {"effort": (request.reasoning or {}).get("effort"), "summary": None},
                "safety_identifier": request.safety_identifier,
                "service_tier": "default",
                "store": self._is_stored,
                "temperature": self._params.temperature,
                "text": {"format": (request.text or {}).get("format") or {"type": "text"}},
                "tool_choice": request.tool_choice or "auto",
                "tools": request.tools or [],
                "top_logprobs": 0,
                "top_p": self._params.top_p,
                "truncation": "disabled",
                "usage": self._usage_json,
                "user": request.user,
            }
        )

    async def _events_of_output(self) -> AsyncGenerator[bytes, None]:
        """Reads the outputs of the engine to their end, and yields the events of their items."""
        prompt: str | None = None
        reason: str | None = None
        token_ids: list[int] = []
        async with contextlib.aclosing(self._read_deltas()) as outputs:
            async for output, deltas in outputs:
                prompt = output.prompt
                for sequence in output.outputs:  # there is one
                    token_ids += sequence.token_ids
                    reason = sequence.finish_reason
                written = self._items.append(deltas)
                if written:
                    yield written
        written = self._items.finish("completed" if reason == "stop" else "incomplete")
        num_reasoning_tokens = 0
        if any(item["type"] == "reasoning" for item in self._items.items):
            num_reasoning_tokens = await self._context.tokenizer_pool.run(
                lambda: self._count_reasoning_tokens(token_ids, prompt)
            )
        self._usage_json = self._usage.to_response_usage(num_reasoning_tokens)
        if self._status != "cancelled":
            self._status = _STATUS.get(reason or "abort", "cancelled")
        self._store_response()
        yield written

    def _store_response(self) -> None:
        """Stores the response and its conversation."""
        if self._is_stored:
            conversation = encode_json([*self._messages, *items_to_messages(self._items.items)])
            salt, owner = self._request.cache_salt, self._caller.key
            self._store.finish(self._id, StoredResponse(self.snapshot(), conversation, salt, owner))

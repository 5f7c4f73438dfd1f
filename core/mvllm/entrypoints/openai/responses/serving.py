"""`POST /v1/responses`: the next turn of a conversation, as a list of items.

The idea: a response is a chat completion in another shape. The request becomes one for a chat completion, so a model
sees the same prompt and writes the same tokens; what it writes is taken apart by the same readers, and their deltas
become items and events.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

import msgspec

from mvllm.entrypoints.openai.chat.serving_base import ChatHandler
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
from mvllm.entrypoints.parsers.interface import ReasoningDelta
from mvllm.errors import RequestError

_STATUS = {"stop": "completed", "length": "incomplete", "abort": "cancelled"}
_LAST_EVENT = {"completed": "completed", "failed": "failed"}
"""By status; of any other it is `incomplete`."""


class ResponsesHandler(ChatHandler):
    """One request for a response.

    Args:
        context, model: As for RequestHandler.
        request: The body of the HTTP request.
        store: Where earlier responses are, and where this one goes.
        caller: Who has sent it.

    Raises:
        RequestError: On construction: a field is not acceptable.
        APIError: The response to go on with is not known.
    """

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
        before = request.previous_response_id
        with _responses_field_names():
            self._messages = [*store.conversation(before, caller), *input_messages(request.input)]
            if request.cache_salt is None:  # what was said under a salt stays under it
                salt = store.cache_salt(before, caller)
                request = msgspec.structs.replace(request, cache_salt=salt)
            super().__init__(context, model, "resp_", to_chat_request(request, self._messages))
        self._is_stored = request.store is not False and store.is_enabled
        self._events = ResponseEventEncoder()
        self._items = OutputItems(self._events)
        self._status = "in_progress"
        self._error: dict[str, Any] | None = None
        self._usage_json: dict[str, Any] | None = None

    async def start(self) -> None:
        """Hands the request to the engine. See RequestHandler."""
        with _responses_field_names():
            await super().start()
        if self._is_stored:
            self._store.add_running(self._id, self, self._caller)

    def close(self) -> None:
        """Ends the request in the engine, if that goes on with it. Idempotent."""
        self._store.finish(self._id)
        super().close()

    def cancel(self) -> None:
        """Ends the request in the engine; whoever reads the answer gets what there is of it."""
        self._status = "cancelled"
        super().close()

    async def full_response(self) -> bytes:
        """The whole answer."""
        with _responses_field_names():
            async for _ in self._events_of_output():
                pass
        return self.snapshot()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer's events; an error is one of them."""
        opening = b'"response":' + self.snapshot()
        write = self._events.encode_raw
        yield write("response.created", opening) + write("response.in_progress", opening)
        written = b""
        try:
            async with contextlib.aclosing(self._events_of_output()) as pieces:
                async for piece in pieces:
                    written += piece
                    if self._status == "in_progress":  # else it leaves together with the stream's end
                        yield written
                        written = b""
        except Exception as e:  # noqa: BLE001  (logged where it is not an answer)
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
        asked = self._response_request
        return encode_json(
            {
                "id": self._id,
                "object": "response",
                "created_at": self._created,
                "status": self._status,
                "background": False,
                "error": self._error,
                "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
                "instructions": asked.instructions,
                "max_output_tokens": asked.max_output_tokens,
                "max_tool_calls": asked.max_tool_calls,
                "metadata": asked.metadata or {},
                "model": self._model,
                "output": self._items.items,
                "parallel_tool_calls": asked.parallel_tool_calls is not False,
                "previous_response_id": asked.previous_response_id,
                "prompt_cache_key": asked.prompt_cache_key,
                "reasoning": {"effort": (asked.reasoning or {}).get("effort"), "summary": None},
                "safety_identifier": asked.safety_identifier,
                "service_tier": "default",
                "store": self._is_stored,
                "temperature": self._params.temperature,
                "text": {"format": (asked.text or {}).get("format") or {"type": "text"}},
                "tool_choice": asked.tool_choice or "auto",
                "tools": asked.tools or [],
                "top_logprobs": 0,
                "top_p": self._params.top_p,
                "truncation": "disabled",
                "usage": self._usage_json,
                "user": asked.user,
            }
        )

    async def _events_of_output(self) -> AsyncGenerator[bytes, None]:
        """Reads the answer to its end; gives the events that tell of it."""
        reader = None
        prompt: str | None = None
        reason: str | None = None
        token_ids: list[int] = []
        async with contextlib.aclosing(self._engine_requests.outputs()) as outputs:
            async for _, output in outputs:
                self._usage.add(0, output)
                if reader is None:
                    reader, prompt = self._make_parser_stream(output), output.prompt
                for sequence in output.outputs:  # of which there is one
                    token_ids += sequence.token_ids
                    reason = sequence.finish_reason
                    if reason == "error":
                        raise self._engine_requests.error_of(sequence)
                    deltas = reader.feed(sequence.text)
                    if reason is not None:
                        deltas += reader.finish()
                    written = self._items.append(deltas)
                    if written:
                        yield written
        written = self._items.finish("completed" if reason == "stop" else "incomplete")
        num_thoughts = 0
        if any(item["type"] == "reasoning" for item in self._items.items):
            num_thoughts = await self._context.tokenizer_pool.run(
                lambda: self._count_reasoning_tokens(token_ids, prompt)
            )
        self._usage_json = self._usage.to_response_usage(num_thoughts)
        if self._status != "cancelled":
            self._status = _STATUS.get(reason or "abort", "cancelled")
        self._store_response()
        yield written

    def _store_response(self) -> None:
        """Stores what has become of the response."""
        if self._is_stored:
            conversation = encode_json([*self._messages, *items_to_messages(self._items.items)])
            salt, owner = self._request.cache_salt, self._caller.key
            self._store.finish(self._id, StoredResponse(self.snapshot(), conversation, salt, owner))

    def _count_reasoning_tokens(self, token_ids: Sequence[int], prompt: str | None) -> int:
        """How many tokens it took until the thoughts had come to their end."""
        tokenizer, skip_special = self._engine.tokenizer, self._params.skip_special_tokens

        def thoughts(num_tokens: int) -> tuple[bool, int]:
            """Whether they go on behind that many tokens, and how long they are by then."""
            stream = self._output_parser.stream(prompt)
            text = tokenizer.decode(token_ids[:num_tokens], skip_special_tokens=skip_special)
            deltas = stream.feed(text)
            return stream.in_reasoning, sum(len(delta.text) for delta in deltas if isinstance(delta, ReasoningDelta))

        go_on, length = thoughts(len(token_ids))
        if go_on:
            return len(token_ids)
        return bisect.bisect_left(range(len(token_ids)), True, key=lambda n: thoughts(n) == (False, length))


@contextlib.contextmanager
def _responses_field_names() -> Iterator[None]:
    """Has errors name the fields of this request, not those of the chat completion that it becomes."""
    try:
        yield
    except RequestError as e:
        raise RequestError(str(e), parameter=CHAT_TO_RESPONSES_FIELDS.get(e.parameter or "", e.parameter)) from e

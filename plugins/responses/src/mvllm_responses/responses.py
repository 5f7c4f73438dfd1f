"""`POST /v1/responses`: the next response of a conversation, as a list of items.

A response is one chat completion or several in another format. The request is converted to a chat completion request,
so the model gets the same prompt and generates the same tokens. The same parsers read its output, and their deltas
become items and events. While a turn of the model has calls of tool servers, the server runs them and adds a turn:

    list tools ─> turn ─> run its calls ─> turn ─> ... ─> a turn without calls, or with something for the client to do
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from mvllm.extension_api import RequestError
from mvllm.extension_api.http import (
    Caller,
    Handler,
    ServingContext,
    encode_json,
    renamed_fields,
    to_api_error,
)
from mvllm_responses.client_functions import client_functions
from mvllm_responses.database import StoredResponse
from mvllm_responses.input_items import (
    CHAT_TO_RESPONSES_FIELDS,
    MessageBuilder,
    to_chat_request,
)
from mvllm_responses.items import Item, input_items
from mvllm_responses.mcp.functions import MCPResult, redacted_tools
from mvllm_responses.mcp.toolbox import MCPToolbox
from mvllm_responses.output_items import OutputItems, ResponseEventEncoder
from mvllm_responses.protocol import ResponsesRequest
from mvllm_responses.store import ResponseStore
from mvllm_responses.store_file import INTERRUPTED
from mvllm_responses.turn import ResponseTurn

T = TypeVar("T")

_LAST_EVENT = {"completed": "completed", "failed": "failed"}
"""The stream's last event by status; `incomplete` for any other status."""

_LOGPROBS = "message.output_text.logprobs"
_RESULT_BYTES_PER_TOKEN = 2
_TOO_MANY_CALLS = {
    "type": "mcp_protocol_error",
    "code": -32603,
    "message": "This call was not run: the response has reached its limit of calls. Answer without further calls.",
}


@dataclass(frozen=True)
class History:
    """What a response continues.

    Attributes:
        items: The items before its input.
        cache_salt: Of the previous response; None for none.
        conversation_id: The conversation that gets its input and output; None for none.
    """

    items: Sequence[Item] = ()
    cache_salt: str | None = None
    conversation_id: str | None = None


@dataclass
class _Totals:
    """The tokens of the turns that have ended."""

    usage: dict[str, Any] | None = None
    num_generated: int = 0
    num_tokens: int = 0
    num_turns: int = 0
    last_turn: ResponseTurn | None = None

    def add(self, turn: ResponseTurn) -> None:
        """Adds a turn at its end."""
        self.usage = turn.usage() if self.usage is None else _sum(self.usage, turn.usage())
        self.num_generated += turn.num_generated_tokens
        self.num_tokens += turn.num_tokens
        self.num_turns += 1
        self.last_turn = turn


class ResponsesHandler(Handler):
    """Answers one request of the Responses API.

    Args:
        context, model: As for RequestHandler.
        request: The body of the HTTP request.
        store: Stores this response.
        caller: The sender of the request.
        history: What the response continues.
        toolbox: The tool servers of the request; None for none.

    Attributes:
        id: The response's id.

    Raises:
        RequestError: On construction: a field is not valid.
    """

    field_names = CHAT_TO_RESPONSES_FIELDS

    def __init__(
        self,
        context: ServingContext,
        model: str,
        request: ResponsesRequest,
        store: ResponseStore,
        caller: Caller,
        history: History = History(),
        toolbox: MCPToolbox | None = None,
    ) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self.is_streaming = bool(request.stream)
        self._created = int(time.time())
        self._completed: int | None = None
        self._context, self._model = context, model
        self._store, self._caller = store, caller
        self._history, self._toolbox = history, toolbox
        if toolbox is not None:  # about half of the context, so that one result does not end the response
            most = _RESULT_BYTES_PER_TOKEN * context.engine.model_config.max_model_len
            toolbox.max_result_bytes = min(toolbox.max_result_bytes, most)
        if request.cache_salt is None:  # a conversation keeps its salt
            request = msgspec.structs.replace(request, cache_salt=history.cache_salt)
        self._request = request
        self._is_stored = request.store is not False and store.is_enabled
        self._is_background = bool(request.background)
        self._status = "queued" if self._is_background else "in_progress"
        self._error: dict[str, Any] | None = None
        self._totals = _Totals()
        self._events = ResponseEventEncoder()
        self._items = OutputItems(self._events)
        self._num_calls = 0
        self._cancelled = asyncio.Event()
        self._is_finished = False
        with renamed_fields(self.field_names):
            has_more = bool(history.items) or request.instructions is not None
            self._input = input_items(request.input, may_be_empty=has_more)
            self._builder = MessageBuilder()
            self._builder.add(history.items, "items")
            self._builder.take_approved_calls()  # those that were interrupted: not approved for this request
            self._builder.add(self._input)
            _, self._items.namespaced = client_functions(request.tools)
            self._turn = self._make_turn()

    # --- the handler

    async def start(self) -> None:
        """Stores the response, and adds the prompt of the first turn to the engine unless that has to wait: for the
        tools of servers, or in the background for the compilation of a constraint.
        """
        if self._is_stored:
            context = encode_json([*self._history.items, *self._input])
            stored = StoredResponse(
                self.snapshot(),
                context,
                self._request.cache_salt,
                self._caller.key,
                is_running=True,
                is_streamed=self._is_background and self.is_streaming,
            )
            self._is_stored = await self._store.add_running(self.id, self, stored, is_background=self._is_background)
        waits = self._toolbox is not None or (self._is_background and self._turn.is_constrained)
        if not waits:
            await self._start_turn()

    def close(self) -> None:
        """Aborts what has not finished. Idempotent."""
        if not self._is_finished:
            self._is_finished = True
            if self._is_stored:
                self._store.discard(self.id)
        self._turn.close()
        if self._toolbox is not None:
            self._toolbox.close()

    def cancel(self) -> None:
        """Aborts the response. It ends with the items generated so far."""
        if not self._is_finished:
            self._status = "cancelled"
            self._cancelled.set()
            self._turn.close()

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompts and outputs of all turns so far."""
        running = 0 if self._turn is self._totals.last_turn else self._turn.num_tokens
        return self._totals.num_tokens + running

    async def full_response(self) -> bytes:
        """The body of the response. See Handler."""
        try:
            with renamed_fields(self.field_names):
                async for _ in self._run():
                    pass
        except Exception as e:
            if not any(item["type"] == "mcp_call" for item in self._items.items):
                raise
            self._fail(e)  # what the tools have done cannot be undone: the client has to know it
        await self._finish()
        return self.snapshot()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The response as server-sent events. See Handler."""
        opening = b'"response":' + self.snapshot()
        write = self._events.encode_raw
        if self._is_background:
            yield write("response.created", opening) + write("response.queued", opening)
        else:
            yield write("response.created", opening) + write("response.in_progress", opening)
        written = b""
        try:
            async with contextlib.aclosing(self._run()) as events:
                async for event in events:
                    written += event
                    if self._status == "in_progress":  # the last events are sent with the stream's end
                        yield written
                        written = b""
        except Exception as e:  # noqa: BLE001  (to_api_error logs it)
            written += self._fail(e)
        await self._finish()
        last = _LAST_EVENT.get(self._status, "incomplete")
        yield written + write(f"response.{last}", b'"response":' + self.snapshot())

    async def count_input_tokens(self) -> int:
        """The number of tokens of the prompt of the first turn. Nothing is run, also no approved call.

        Raises:
            RequestError: The prompt is not acceptable.
        """
        with renamed_fields(self.field_names):
            if self._toolbox is not None:
                async for _ in self._list_missing_tools(self._toolbox):
                    pass
                self._turn = self._make_turn()
            return await self._turn.count_prompt_tokens()

    @property
    def num_events(self) -> int:
        """The number of events that `stream` has made: the sequence number of the next one."""
        return self._events.num_events

    @property
    def has_ended(self) -> bool:
        """Whether the response has ended and is stored."""
        return self._is_finished

    def snapshot(self) -> bytes:
        """The response as it is now."""
        request, conversation_id = self._request, self._history.conversation_id
        return encode_json(
            {
                "id": self.id,
                "object": "response",
                "created_at": self._created,
                "status": self._status,
                "background": self._is_background,
                "completed_at": self._completed,
                "conversation": None if conversation_id is None else {"id": conversation_id},
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
                **self._turn.sampling,
                "text": {"format": (request.text or {}).get("format") or {"type": "text"}},
                "tool_choice": request.tool_choice or "auto",
                "tools": redacted_tools(request.tools),
                "top_logprobs": request.top_logprobs or 0,
                "truncation": request.truncation or "disabled",
                "usage": self._totals.usage,
                "user": request.user,
                **self._turn.warning_fields,
            }
        )

    # --- turns

    async def _run(self) -> AsyncGenerator[bytes, None]:
        """Runs all turns and calls, and yields the events of their items. Sets the status."""
        toolbox = self._toolbox
        if toolbox is not None:
            yield await self._begin()
            async for event in self._prepare_tools(toolbox):
                yield event
            self._turn = self._make_turn()
        while not self._cancelled.is_set():
            turn, first_item, written = self._turn, len(self._items.items), b""
            await self._start_turn()
            async with contextlib.aclosing(turn.stream()) as events:
                async for event in events:
                    written += event if self._status != "queued" else await self._begin()
                    if written and turn.finish_reason is None:
                        yield written
                        written = b""
            self._totals.add(turn)
            calls = list(self._items.pending_calls)
            if not calls or self._cancelled.is_set():
                self._set_final_status(turn)
                yield written
                break
            yield written
            assert toolbox is not None
            may_call = self._num_calls + len(calls) <= self._max_calls(toolbox)
            async for event in self._run_calls(toolbox):
                yield event
            made = self._items.items[first_item:]
            if any(item["type"] in ("function_call", "mcp_approval_request") for item in made):
                self._set_final_status(turn)  # the client goes on
                break
            self._builder.add(made, "output")
            if (left := self._tokens_left()) == 0:
                self._status = "incomplete"
                break
            self._turn = self._make_turn("auto" if may_call else "none", left)
        yield self._end_pending_calls()

    async def _begin(self) -> bytes:
        """The status `in_progress`, and the event of it."""
        if self._status != "queued":
            return b""
        self._status = "in_progress"
        body = self.snapshot()
        if self._is_stored:
            await self._store.update_running(self.id, body)
        return self._events.encode_raw("response.in_progress", b'"response":' + body)

    def _make_turn(self, tool_choice: str | None = None, max_output_tokens: int | None = None) -> ResponseTurn:
        """The next turn of the model.

        Args:
            tool_choice: In place of the request's, which applies to the first turn.
            max_output_tokens: In place of the request's.
        """
        request, toolbox = self._request, self._toolbox
        more_tools: list[dict[str, Any]] = []
        if toolbox is not None:
            choice = request.tool_choice
            more_tools = toolbox.chat_tools
            if not toolbox.is_ready:  # any tool shows whether this server can run tools
                more_tools = [{"type": "function", "function": {"name": "any"}}]
                choice = None
            elif tool_choice is None:
                choice = toolbox.tool_choice(choice)
            request = msgspec.structs.replace(request, tool_choice=choice)
        if tool_choice is not None:
            request = msgspec.structs.replace(request, tool_choice=tool_choice)
        if max_output_tokens is not None:
            request = msgspec.structs.replace(request, max_output_tokens=max_output_tokens)
        chat_request = to_chat_request(request, self._builder.messages, more_tools)
        if request.top_logprobs or _LOGPROBS in (request.include or ()):
            chat_request = msgspec.structs.replace(chat_request, logprobs=True, top_logprobs=request.top_logprobs or 0)
        if self._is_background or chat_request.logprobs:  # its parts are needed, also for an answer without a stream
            chat_request = msgspec.structs.replace(chat_request, stream=True)
        number = self._totals.num_turns
        turn_id = self.id if number == 0 else f"{self.id}-{number}"
        truncates = request.truncation == "auto"
        return ResponseTurn(self._context, self._model, chat_request, turn_id, self._items, truncates=truncates)

    async def _start_turn(self) -> None:
        """Adds the prompt of the turn to the engine, unless it is there."""
        if self._turn.is_started or self._cancelled.is_set():
            return
        self._turn.lora_request = self.lora_request
        await self._turn.start()
        self.relaxations = self._turn.relaxations
        if self._cancelled.is_set():  # in the meantime
            self._turn.close()

    def _tokens_left(self) -> int | None:
        limit = self._request.max_output_tokens
        return None if limit is None else max(0, limit - self._totals.num_generated)

    def _set_final_status(self, turn: ResponseTurn) -> None:
        if self._status == "cancelled":
            return
        match turn.finish_reason:
            case "stop":
                self._status = "completed"
            case "length":
                self._status = "incomplete"
            case _ if self._is_background:  # the server is ending
                self._status = "failed"
                self._error = {"code": "server_error", "message": INTERRUPTED}
            case _:
                self._status = "cancelled"

    def _fail(self, error: Exception) -> bytes:
        """Ends the response with an error; returns the events of its items."""
        shown = to_api_error(error)
        if self._status != "cancelled":
            self._status = "failed"
            code = "invalid_prompt" if shown.status < 500 else "server_error"
            self._error = {"code": code, "message": shown.message}
        return self._items.finish("incomplete") + self._end_pending_calls()

    async def _finish(self) -> None:
        """Stores the response, and adds its items to its conversation."""
        if self._is_finished:
            return
        self._is_finished = True  # first: it cannot be cancelled any more
        if self._status == "completed":
            self._completed = int(time.time())
        conversation_id = self._history.conversation_id
        if self._status not in ("completed", "incomplete"):
            conversation_id = None
        if self._is_stored or conversation_id is not None:
            items = [*self._input, *self._items.items]
            await self._store.finish(self.id, self.snapshot(), conversation_id, items)

    # --- tool servers

    def _max_calls(self, toolbox: MCPToolbox) -> int:
        limit = self._request.max_tool_calls
        return toolbox.max_calls if limit is None else min(limit, toolbox.max_calls)

    async def _prepare_tools(self, toolbox: MCPToolbox) -> AsyncGenerator[bytes, None]:
        """Lists the tools of servers that have no list in the conversation, and runs the approved calls."""
        async for event in self._list_missing_tools(toolbox):
            yield event
        approved = self._builder.take_approved_calls()
        if approved:
            first_item = len(self._items.items)
            for request in approved:
                yield self._items.begin_approved_call(request)
            async for event in self._run_calls(toolbox):
                yield event
            self._builder.add(self._items.items[first_item:], "output")

    async def _list_missing_tools(self, toolbox: MCPToolbox) -> AsyncGenerator[bytes, None]:
        """Lists the tools of servers that have no list in the conversation."""
        listed = self._builder.listed_tools
        for tool in toolbox.tools:
            if tool.label in listed and listed[tool.label].get("error") is None:
                continue
            yield self._items.begin_list(tool.label)
            found = await self._unless_cancelled(toolbox.list_tools(tool))
            tools, error = ([], "The response was cancelled.") if found is None else found
            yield self._items.finish_list(tools, error)
            listed[tool.label] = self._items.items[-1]
        toolbox.add_listed(listed)
        self._items.functions = toolbox.functions
        self._builder.set_function_names(
            {(function.server_label, function.name): name for name, function in toolbox.functions.items()}
        )

    async def _run_calls(self, toolbox: MCPToolbox) -> AsyncGenerator[bytes, None]:
        """Runs the pending calls at once, and yields the events of their ends in order. Calls above the limit fail."""
        calls = list(self._items.pending_calls)
        max_calls = max(0, self._max_calls(toolbox) - self._num_calls)
        self._num_calls += len(calls)
        results = await self._unless_cancelled(_gather(toolbox, calls[:max_calls]))
        refused = [MCPResult(error=_TOO_MANY_CALLS)] * len(calls[max_calls:])
        for item, result in zip(calls, [*results, *refused] if results is not None else []):
            yield self._items.finish_call(item, result)

    def _end_pending_calls(self) -> bytes:
        """Ends the calls that were not run; returns their events."""
        return b"".join(self._items.finish_call(item, None) for item in list(self._items.pending_calls))

    async def _unless_cancelled(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`; None if the response is cancelled first."""
        task = asyncio.create_task(work)
        cancelled = asyncio.create_task(self._cancelled.wait())
        try:
            await asyncio.wait([task, cancelled], return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            cancelled.cancel()


class InputTokensHandler(Handler):
    """Answers a request for the number of tokens of a response's input.

    Args:
        response: The response, which is not started.
    """

    num_tokens = 0  # the model runs none

    def __init__(self, response: ResponsesHandler) -> None:
        self._response = response
        self._count = 0

    async def start(self) -> None:
        """Counts the tokens. See Handler."""
        self._count = await self._response.count_input_tokens()

    async def full_response(self) -> bytes:
        """The body of the response. See Handler."""
        return encode_json({"object": "response.input_tokens", "input_tokens": self._count})

    def close(self) -> None:
        """See Handler."""
        self._response.close()


async def _gather(toolbox: MCPToolbox, calls: Sequence[Item]) -> list[MCPResult]:
    return await asyncio.gather(*map(toolbox.call, calls))


def _sum(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The sums of the numbers of two objects with the same fields."""
    return {
        key: _sum(value, other[key]) if isinstance(value, dict) else value + other[key] for key, value in one.items()
    }


def check_combinations(request: ResponsesRequest) -> None:
    """Checks fields that exclude each other.

    Raises:
        RequestError: Two of them are given.
    """
    if request.background and request.store is False:
        raise RequestError("background needs the response to be stored; leave store out.", parameter="background")
    if request.previous_response_id is not None and request.conversation is not None:
        raise RequestError(
            "previous_response_id and conversation exclude each other; send one of them.", parameter="conversation"
        )
    if request.max_tool_calls is not None and request.max_tool_calls < 1:
        raise RequestError("max_tool_calls must be at least 1.", parameter="max_tool_calls")

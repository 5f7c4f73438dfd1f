"""Background responses: they run without a client, and their events can be read from any point, in every process.

run ─> events of the last 50 ms ─> store (one write for all responses) ─> readers, from the number they ask for
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response

from mvllm.extension_api import APIError, get_logger
from mvllm.extension_api.http import (
    AdmittedRequest,
    EventStreamResponse,
    cancel_on_disconnect,
    encode_json,
    json_response,
)
from mvllm_responses.database import EventBatch
from mvllm_responses.responses import ResponsesHandler
from mvllm_responses.store import ResponseStore

logger = get_logger("mvllm.responses.background")

_FLUSH_SECONDS = 0.05
_POLL_SECONDS = 0.1
_END_SECONDS = 1.0  # after the end of a response, in which its last events are stored


class BackgroundResponses:
    """Runs the background responses of one process.

    Args:
        store: Has the responses and their events.
        send_timeout: Seconds for which a reader may leave a stream unread.
    """

    def __init__(self, store: ResponseStore, send_timeout: float) -> None:
        self._store = store
        self._send_timeout = send_timeout
        self._tasks: set[asyncio.Task[None]] = set()
        self._pending: list[EventBatch] = []
        self._flushed = asyncio.Event()
        self._flush_task: asyncio.Task[None] | None = None

    async def start(self, request: Request, handler: ResponsesHandler, admitted: AdmittedRequest) -> Response:
        """Starts a response; returns it as it is then, or its events.

        Args:
            admitted: Ended when the response has ended, or here after an error.

        Raises:
            As the handler.
        """
        is_running = False
        try:
            async with cancel_on_disconnect(request.receive):
                await handler.start()
                admitted.count_tokens()
            task = asyncio.create_task(self._run(handler, admitted))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            is_running = True
        finally:
            if not is_running:
                admitted.end()
        if handler.is_streaming:
            return self.stream(handler.id, -1)
        return json_response(handler.snapshot())

    def stream(self, response_id: str, after: int) -> EventStreamResponse:
        """The events of a response after number `after`, to its end. A reader that leaves does not end it."""
        return EventStreamResponse(self._read(response_id, after), self._send_timeout)

    async def _run(self, handler: ResponsesHandler, admitted: AdmittedRequest) -> None:
        try:
            first = 0
            async with contextlib.aclosing(handler.stream()) as events:
                async for event in events:
                    next_number = handler.num_events
                    if handler.is_streaming and next_number > first:
                        is_final = handler.has_ended
                        self._add(EventBatch(handler.id, first, next_number - 1, event, is_final))
                    first = next_number
        except Exception:  # the store is the only cause that the handler does not turn into an event
            logger.exception("A background response failed.")
        finally:
            admitted.end()

    # --- events

    def _add(self, batch: EventBatch) -> None:
        last = self._pending[-1] if self._pending else None
        if last is not None and last.response_id == batch.response_id:
            joined = EventBatch(batch.response_id, last.first, batch.last, last.data + batch.data, batch.is_final)
            self._pending[-1] = joined
        else:
            self._pending.append(batch)
        if self._flush_task is None:
            self._flush_task = asyncio.create_task(self._flush())

    async def _flush(self) -> None:
        """Stores the events, until there are none for a while."""
        while self._pending:
            batches, self._pending = self._pending, []
            try:
                await self._store.add_events(batches)
            except Exception:  # later events, of other responses too, are still to be stored
                logger.exception("Events of background responses could not be stored.")
            flushed, self._flushed = self._flushed, asyncio.Event()
            flushed.set()
            await asyncio.sleep(_FLUSH_SECONDS)
        self._flush_task = None

    async def _read(self, response_id: str, after: int) -> AsyncGenerator[bytes, None]:
        loop = asyncio.get_running_loop()
        last_change = loop.time()
        while True:
            flushed = self._flushed
            try:
                batches = await self._store.events(response_id, after)
            except APIError as e:
                yield _error_event(after + 1, e.message)
                return
            if batches is None:
                yield _error_event(
                    after + 1, "The events of this response are not stored any more; retrieve it without stream."
                )
                return
            for batch in batches:
                events = batch.data.split(b"\n\n")[max(0, after + 1 - batch.first) : -1]
                after, last_change = batch.last, loop.time()
                yield b"".join(event + b"\n\n" for event in events)
                if batch.is_final:
                    return
            if not batches:
                if loop.time() - last_change > _END_SECONDS and not await self._store.has_running(response_id):
                    return  # there was no event after that number
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(flushed.wait(), _POLL_SECONDS)


def _error_event(number: int, message: str) -> bytes:
    fields = {"type": "error", "sequence_number": number, "code": "server_error", "message": message, "param": None}
    return b"event: error\ndata: " + encode_json(fields) + b"\n\n"

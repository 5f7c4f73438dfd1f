"""Responses to clients that may disconnect or stop reading while the engine works.

The task that sends a response is cancelled when its client disconnects, or has read nothing for too long. The
cancellation closes the generator of the response, which aborts its requests in the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mvllm.entrypoints.openai.common.server_sent_events import DONE
from mvllm.logging import get_logger

logger = get_logger(__name__)

_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # so that proxies do not buffer
]

CLIENT_CLOSED_REQUEST = 499
"""The status of a response whose client has disconnected; for the log."""


@dataclass(frozen=True)
class StreamFormat:
    """How the parts of a stream follow each other.

    Attributes:
        media_type: Value of the header Content-Type.
        filler: Bytes without a meaning that may stand between two parts.
    """

    media_type: bytes
    filler: bytes


SERVER_SENT_EVENTS = StreamFormat(b"text/event-stream; charset=utf-8", b":\n\n")  # a comment, which clients ignore
JSON_LINES = StreamFormat(b"application/x-ndjson", b" ")  # white space before the object of the next line
_FORMATS = {b"text/event-stream": SERVER_SENT_EVENTS, b"application/x-ndjson": JSON_LINES}


def stream_format(media_type: bytes) -> StreamFormat | None:
    """The format of a stream with this Content-Type; None for another response."""
    return _FORMATS.get(media_type.partition(b";")[0].strip())


class ClientDisconnected(Exception):
    """The client has disconnected."""


@contextlib.asynccontextmanager
async def cancel_on_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancels the body of the `async with` when the client disconnects.

    Raises:
        ClientDisconnected: The client has disconnected.
    """
    task = asyncio.current_task()
    assert task is not None
    disconnected = False

    async def watch() -> None:
        nonlocal disconnected
        while (await receive())["type"] != "http.disconnect":
            pass
        disconnected = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if disconnected and task.uncancel() == 0:
            raise ClientDisconnected from None
        raise
    finally:
        watcher.cancel()


WriteChunk = Callable[[bytes], None]


class RequestConnection:
    """The connection of a request, in its scope as `mvllm.connection`.

    Args:
        abort: Closes the connection at once, and discards unread data.
        writer: Returns a function that writes a chunk of the request's response now; None while that is not possible.

    Attributes:
        filler: Bytes without a meaning that may be sent between two parts of the response, to find out whether a client
            that has closed its sending side still reads.
    """

    def __init__(
        self,
        abort: Callable[[], None],
        writer: Callable[[RequestConnection], WriteChunk | None] = lambda connection: None,
    ) -> None:
        self.abort = abort
        self.filler = b""
        self._writer = writer

    @property
    def write_chunk(self) -> WriteChunk | None:
        """Writes a part of a response that has started, past the application's layers and without waiting.

        None while the client has to read first, and if the response is not sent in chunks, has ended, or has no client
        any more. The bytes on the connection are those of an ASGI `send` with `more_body`.
        """
        return self._writer(self)


class EventStreamResponse(Response):
    """A response of server-sent events or JSON lines, sent as they are generated.

    Args:
        events: The events; DONE, if there is one, is the last. Closed at the end, also after an error.
        send_timeout: Seconds for which the client may leave a full send buffer unread.
        on_end: Called at the end, also after an error.
        stream_format: Format of the events.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        send_timeout: float,
        on_end: Callable[[], None] = lambda: None,
        stream_format: StreamFormat = SERVER_SENT_EVENTS,
    ) -> None:
        self._format = stream_format
        self._events = events
        self._on_end = on_end
        self._send_timeout = send_timeout
        self._waiting_since: float | None = None
        self.background = None
        self.status_code = 200

    @property
    def waits_for_client(self) -> bool:
        """Whether the next event can be sent only when the client has read some."""
        return self._waiting_since is not None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events."""
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        connection: RequestConnection | None = scope.get("mvllm.connection")
        if connection is not None:
            connection.filler = self._format.filler
        stalled = False
        check_seconds = self._send_timeout / 2
        timers: list[asyncio.TimerHandle] = []

        def check_client() -> None:
            nonlocal stalled
            if self._waiting_since is not None and loop.time() - self._waiting_since > self._send_timeout:
                stalled = True
                task.cancel()
            else:
                timers[:] = [loop.call_later(check_seconds, check_client)]

        timers.append(loop.call_later(check_seconds, check_client))
        try:
            async with cancel_on_disconnect(receive), contextlib.aclosing(self._events) as events:
                headers = [(b"content-type", self._format.media_type), *_HEADERS]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                more = True
                async for event in events:
                    more = not event.endswith(DONE)
                    self._waiting_since = loop.time()
                    await send({"type": "http.response.body", "body": event, "more_body": more})
                    self._waiting_since = None
                if more:
                    await send({"type": "http.response.body", "body": b""})
        except ClientDisconnected:
            logger.debug("A client disconnected before the end of its stream.")
        except asyncio.CancelledError:
            if not stalled or task.uncancel() > 0:
                raise
            logger.info("A client has read nothing for %g s; its request is aborted.", self._send_timeout)
            if connection is not None:
                connection.abort()  # a normal close would wait for the client to read the rest
        finally:
            timers[0].cancel()
            self._on_end()

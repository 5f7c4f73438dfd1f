"""Answers that take a while, to clients that may leave or stop reading meanwhile.

The idea: the task that writes an answer is cancelled when its client has gone, or has read nothing for too long; the
cancellation reaches the engine through the generator that the answer comes from, which drops its requests.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mvllm.entrypoints.openai.common.server_sent_events import DONE
from mvllm.logging import get_logger

logger = get_logger(__name__)

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies are to pass pieces on as they come
]
_COMMENT = b":\n\n"  # which readers of events leave out

CLIENT_CLOSED_REQUEST = 499
"""The status of an answer that nobody is there to read; for the log."""


class ClientDisconnected(Exception):
    """There is nobody to answer."""


@contextlib.asynccontextmanager
async def cancel_on_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancels what runs within when the client disconnects.

    Raises:
        ClientDisconnected: It did.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:
            raise ClientDisconnected from None
        raise
    finally:
        watcher.cancel()


class RequestConnection:
    """What an answer may ask of the connection it is for; in the scope of its request, as `mvllm.connection`.

    Args:
        abort: Closes the connection at once, with whatever has not been read.

    Attributes:
        filler: What may stand between two pieces of the answer and says nothing. Sent to a client that has closed its
            sending side, to find out whether it still reads.
    """

    def __init__(self, abort: Callable[[], None]) -> None:
        self.abort = abort
        self.filler = b""


class EventStreamResponse(Response):
    """Server-sent events, written as they come.

    Args:
        events: What is written; nothing comes behind DONE. Closed at the end, whatever the end is.
        send_timeout: Seconds that the client may leave a full buffer unread.
        on_end: Called at the end.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        send_timeout: float,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._events = events
        self._on_end = on_end
        self._send_timeout = send_timeout
        self._waiting_since: float | None = None
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Writes the stream."""
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        connection: RequestConnection | None = scope.get("mvllm.connection")
        if connection is not None:
            connection.filler = _COMMENT
        stalled = False
        look_every = self._send_timeout / 2
        timers: list[asyncio.TimerHandle] = []

        def look() -> None:
            nonlocal stalled
            if self._waiting_since is not None and loop.time() - self._waiting_since > self._send_timeout:
                stalled = True
                task.cancel()
            else:
                timers[:] = [loop.call_later(look_every, look)]

        timers.append(loop.call_later(look_every, look))
        try:
            async with cancel_on_disconnect(receive), contextlib.aclosing(self._events) as events:
                await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
                more = True
                async for piece in events:
                    more = not piece.endswith(DONE)
                    self._waiting_since = loop.time()
                    await send({"type": "http.response.body", "body": piece, "more_body": more})
                    self._waiting_since = None
                if more:
                    await send({"type": "http.response.body", "body": b""})
        except ClientDisconnected:
            logger.debug("A client left before the end of its stream.")
        except asyncio.CancelledError:
            if not stalled or task.uncancel() > 0:
                raise
            logger.info("A client has read nothing for %g s; its request is dropped.", self._send_timeout)
            if connection is not None:
                connection.abort()  # closing would wait for it to read the rest
        finally:
            timers[0].cancel()
            self._on_end()

"""HTTP/1.1 connections for packages through which every chunk of many streams passes: load generators and routers.

On httptools, the parser of the server. A request is sent as it is given; there are no redirects, cookies, proxies or
compression. What a body costs is one call of the parser for each read of the socket. For everything else there is
`http_client.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast

import httptools

Headers = list[tuple[bytes, bytes]]
OnBody = Callable[[bytes], None]
"""Called with new bytes of the body of a response with status 200, where the event loop receives them."""

_MAX_UNREAD_BYTES = 256 << 10
_MAX_IDLE_CONNECTIONS = 1024
_FIRST_FINAL_STATUS = 200


class ConnectionLostError(Exception):
    """A server could not be reached, or its response is incomplete or no valid HTTP."""


class HTTPConnection(asyncio.Protocol):
    """One connection, with one request at a time.

    The body of a response is read as it arrives: what has been received and not read is limited, and the server has to
    stop sending beyond that.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._lost: Exception | None = None
        self._is_paused = False
        self.idle_since = 0.0
        self._begin(None)

    def _begin(self, on_body: OnBody | None) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._on_body = on_body
        self._headers: Headers = []
        self._status = 0
        self._parts: list[bytes] = []
        self._num_unread = 0
        self._has_length = False
        self._is_complete = False
        self._stays_open = False

    # --- requests

    def send(self, head: bytes, body: bytes = b"", on_body: OnBody | None = None) -> None:
        """Sends a request. The response to the one before must have been read.

        Args:
            head: Request line and headers, with the empty line.
            on_body: Receives the body of a response with status 200; `read_body` then has nothing, and waits for its
                end. What it raises, `read_body` raises.
        """
        assert self._transport is not None
        self._begin(on_body)
        self._transport.writelines((head, body) if body else (head,))

    async def read_head(self) -> tuple[int, Headers]:
        """Status and headers of the response, the names in lower case.

        Raises:
            ConnectionLostError: The connection has ended.
        """
        while not self._status:
            await self._wait()
        return self._status, self._headers

    async def read_body(self) -> AsyncIterator[bytes]:
        """The rest of the response's body, in pieces as they arrive. Raises as `read_head`, and as `on_body`."""
        while True:
            if self._parts:
                parts, self._parts, self._num_unread = self._parts, [], 0
                if self._is_paused and self._transport is not None:
                    self._is_paused = False
                    self._transport.resume_reading()
                yield parts[0] if len(parts) == 1 else b"".join(parts)
            elif self._is_complete:
                return
            else:
                await self._wait()

    async def _wait(self) -> None:
        if self._lost is not None:
            raise self._lost
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    @property
    def is_reusable(self) -> bool:
        """Whether it can send another request."""
        return self._is_complete and self._stays_open and self._lost is None and not self._parts

    def abort(self) -> None:
        """Ends the connection at once, at which the server aborts the request. Idempotent."""
        if self._transport is not None:
            self._transport.abort()

    # --- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        if self._is_complete:  # no request asks for it
            self._fail(ConnectionLostError("the server sent data without a request"))
            return
        try:
            self._parser.feed_data(data)
            if self._on_body is not None and self._parts and self._status == _FIRST_FINAL_STATUS:
                parts, self._parts, self._num_unread = self._parts, [], 0
                self._on_body(parts[0] if len(parts) == 1 else b"".join(parts))
                if not self._is_complete:
                    return
        except (httptools.HttpParserError, httptools.HttpParserCallbackError) as e:
            self._fail(ConnectionLostError(f"the response is not valid HTTP: {e}"))
            return
        except Exception as e:  # noqa: BLE001  (raised in the task that waits)
            self._fail(e)
            return
        if self._num_unread > _MAX_UNREAD_BYTES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._status and not self._has_length and not self._is_complete and exc is None and self._lost is None:
            self._is_complete = True  # the end of the connection is that of the body
        if self._lost is None:
            what = "in the middle of" if self._status else "before"
            reason = f": {exc}" if exc else ""
            self._lost = ConnectionLostError(f"the server closed the connection {what} the response{reason}")
        self._wake()

    def _fail(self, error: Exception) -> None:
        self._lost = self._lost or error
        self._is_complete = False
        self.abort()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._headers.append((name, value))
        if name in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= _FIRST_FINAL_STATUS:
            self._status = status
        else:  # one below announces the response
            self._headers, self._has_length = [], False

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._num_unread += len(body)

    def on_message_complete(self) -> None:
        self._is_complete = bool(self._status)
        self._stays_open = self._parser.should_keep_alive()


class ConnectionPool:
    """Connections to one server, kept open for further requests. Used in one event loop.

    Args:
        connect: Makes a connection. What it raises, `connection` raises.
        max_idle_seconds: Idle connections are not used after that time: less than that after which the server closes
            them.
    """

    def __init__(self, connect: Callable[[], Awaitable[HTTPConnection]], max_idle_seconds: float) -> None:
        self._connect = connect
        self._max_idle_seconds = max_idle_seconds
        self._idle: list[HTTPConnection] = []
        self._is_closed = False

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[HTTPConnection]:
        """A connection, used within the context. It is closed unless its response has been read to the end."""
        connection = self._take_idle() or await self._connect()
        try:
            yield connection
        finally:
            if connection.is_reusable and not self._is_closed and len(self._idle) < _MAX_IDLE_CONNECTIONS:
                connection.idle_since = time.monotonic()
                self._idle.append(connection)
            else:
                connection.abort()

    def close(self) -> None:
        """Closes the idle connections, and each of the others when it is not used any more. Idempotent."""
        self._is_closed = True
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    def _take_idle(self) -> HTTPConnection | None:
        """The connection that was used last; older ones that have been idle for long are closed."""
        oldest = time.monotonic() - self._max_idle_seconds
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable and connection.idle_since > oldest:
                return connection
            connection.abort()
        return None

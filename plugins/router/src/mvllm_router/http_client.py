"""HTTP/1.1 connections of a router to a server, which are kept for further requests.

A response is read as it arrives: what has been received and not taken is limited, and the model server stops sending
beyond that, as it would for a slow client of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import httptools
import msgspec

from mvllm_router.connection_passing import ConnectionSender

Headers = list[tuple[bytes, bytes]]

_MAX_UNREAD_BYTES = 256 << 10
_MAX_IDLE_SECONDS = 20.0
"""Less than the time after which a model server closes an idle connection."""
_MAX_IDLE_CONNECTIONS = 1024
_FETCH_SECONDS = 10.0
_RETRY_SECONDS = 0.005
_FIRST_FINAL_STATUS = 200
_CREDENTIALS = (b"authorization", b"x-api-key")


class ModelServerLost(Exception):
    """The connection to a model server ended before the response did."""


class ModelConnection(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_lost = False
        self._is_paused = False
        self._begin()
        self.idle_since = 0.0

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: Headers = []
        self._status = 0
        self._parts: list[bytes] = []
        self._num_unread = 0
        self._is_complete = False
        self._stays_open = False

    # --- requests

    def send(self, head: bytes, body: bytes) -> None:
        """Sends a request. The response to the one before must have been read."""
        assert self._transport is not None
        self._begin()
        self._transport.writelines((head, body) if body else (head,))

    async def read_head(self) -> tuple[int, Headers]:
        """Status and headers of the response, the names in lower case.

        Raises:
            ModelServerLost: The connection has ended.
        """
        while not self._status:
            await self._wait()
        return self._status, self._headers

    async def read_body(self) -> AsyncIterator[bytes]:
        """The rest of the response's body, in pieces as they arrive. Raises as `read_head`."""
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
        if self._is_lost:
            raise ModelServerLost
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    @property
    def is_reusable(self) -> bool:
        """Whether it can send another request."""
        return self._is_complete and self._stays_open and not self._is_lost and not self._parts

    def abort(self) -> None:
        """Ends the connection at once, at which the model server aborts the request. Idempotent."""
        if self._transport is not None:
            self._transport.abort()

    # --- of the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserCallbackError):
            self._is_lost = True
            self.abort()
        if self._num_unread > _MAX_UNREAD_BYTES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- of the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= _FIRST_FINAL_STATUS:
            self._status = status
        else:
            self._headers = []

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._num_unread += len(body)

    def on_message_complete(self) -> None:
        self._is_complete = bool(self._status)
        self._stays_open = self._parser.should_keep_alive()


class HTTPClient(ABC):
    """The connections to one server."""

    def __init__(self) -> None:
        self._idle: list[ModelConnection] = []
        self._is_closed = False

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[ModelConnection]:
        """A connection, used within the context. It is closed unless its response has been read to the end.

        Raises:
            ModelServerLost: The model server has ended.
        """
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
        """Closes the idle connections. Idempotent."""
        self._is_closed = True
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    def _take_idle(self) -> ModelConnection | None:
        """The connection that was used last; older ones that have been idle for long are closed."""
        oldest = time.monotonic() - _MAX_IDLE_SECONDS
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable and connection.idle_since > oldest:
                return connection
            connection.abort()
        return None

    @abstractmethod
    async def _connect(self) -> ModelConnection:
        """A new connection.

        Raises:
            ModelServerLost: The server cannot be reached.
        """


class ModelClient(HTTPClient):
    """The connections to one model server, a child process of the router.

    Args:
        sender: Opens connections; closed by `close`.
        internal_key: An administrator's key of the model server, for the router's own requests.
    """

    def __init__(self, sender: ConnectionSender, internal_key: str) -> None:
        super().__init__()
        self._sender = sender
        self._internal_headers: Headers = [(b"authorization", b"Bearer " + internal_key.encode())]

    async def fetch(self, path: str, body: Any = None, headers: Headers | None = None) -> bytes | None:
        """The body of the response to a request of the router itself; None if it is an error, late, or the server has
        ended.

        Args:
            path: Decoded: what it has of a client stays within the path.
            body: Sent as JSON with POST; without it the method is GET.
            headers: Those of a client, in whose name the router asks: their API keys are sent. None for the router's.
        """
        data = b"" if body is None else msgspec.json.encode(body)
        method, target = b"GET" if body is None else b"POST", quote(path, safe="/:", errors="replace").encode()
        sent = self._internal_headers if headers is None else [each for each in headers if each[0] in _CREDENTIALS]
        head = b"%s %s HTTP/1.1\r\nhost: router\r\n" % (method, target)
        head += b"".join(b"%s: %s\r\n" % each for each in sent)
        if data:
            head += b"content-type: application/json\r\ncontent-length: %d\r\n" % len(data)
        with contextlib.suppress(ModelServerLost, OSError, TimeoutError):
            async with asyncio.timeout(_FETCH_SECONDS), self.connection() as connection:
                connection.send(head + b"\r\n", data)
                status, _ = await connection.read_head()
                content = b"".join([part async for part in connection.read_body()])
                return content if status == 200 else None
        return None

    def close(self) -> None:
        """Closes the idle connections. Idempotent."""
        super().close()
        self._sender.close()

    async def _connect(self) -> ModelConnection:
        while True:
            try:
                end = self._sender.connect()
                break
            except BlockingIOError:
                await asyncio.sleep(_RETRY_SECONDS)
            except OSError as e:
                raise ModelServerLost from e
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_unix_connection(ModelConnection, sock=end)
        return connection

"""Connections of a router to a model server, a child process, and the router's own requests to it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any
from urllib.parse import quote

import msgspec

from mvllm.extension_api.http_connection import ConnectionLostError, ConnectionPool, Headers, HTTPConnection
from mvllm_router.connection_passing import ConnectionSender

MAX_IDLE_SECONDS = 20.0
"""Less than the time after which a model server closes an idle connection."""
_FETCH_SECONDS = 10.0
_RETRY_SECONDS = 0.005
_CREDENTIALS = (b"authorization", b"x-api-key")


class ModelClient:
    """The connections to one model server, a child process of the router.

    Args:
        sender: Opens connections; closed by `close`.
        internal_key: An administrator's key of the model server, for the router's own requests.

    Attributes:
        connection: Opens a connection, as `ConnectionPool.connection`.
    """

    def __init__(self, sender: ConnectionSender, internal_key: str) -> None:
        self._pool = ConnectionPool(self._connect, MAX_IDLE_SECONDS)
        self.connection = self._pool.connection
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
        with contextlib.suppress(ConnectionLostError, OSError, TimeoutError):
            async with asyncio.timeout(_FETCH_SECONDS), self.connection() as connection:
                connection.send(head + b"\r\n", data)
                status, _ = await connection.read_head()
                content = b"".join([part async for part in connection.read_body()])
                return content if status == 200 else None
        return None

    def close(self) -> None:
        """Closes the idle connections. Idempotent."""
        self._pool.close()
        self._sender.close()

    async def _connect(self) -> HTTPConnection:
        while True:
            try:
                end = self._sender.connect()
                break
            except BlockingIOError:
                await asyncio.sleep(_RETRY_SECONDS)
            except OSError as e:
                raise ConnectionLostError(str(e)) from e
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_unix_connection(HTTPConnection, sock=end)
        return connection

"""Forwards a request to a model server, and its response to the client as it arrives.

Nothing of a stream is collected: if the client reads slowly, the router stops reading from the model server, which then
stops as for a slow client of its own. If the client disconnects, the connection to the model server is closed, which
aborts the request. If the model server dies in the middle of a stream, the stream ends with an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from starlette.types import Scope, Send

from mvllm.extension_api import APIError, get_logger
from mvllm.extension_api.http_connection import ConnectionLostError, Headers, HTTPConnection
from mvllm.extension_api.server import RequestConnection, api_format, is_same_origin, stream_format
from mvllm_router.model_client import ModelClient

logger = get_logger(__name__)

_OF_A_CONNECTION = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"),
        *(b"trailer", b"transfer-encoding", b"upgrade"),
    )
)
_NOT_FORWARDED = _OF_A_CONNECTION | {b"content-length", b"expect", b"x-request-id"}
_NOT_RETURNED = _OF_A_CONNECTION | {b"date", b"server", b"x-request-id", b"request-id"}  # the router adds its own


class Proxy:
    """Forwards requests.

    Args:
        send_timeout: Seconds for which a client may leave a full send buffer unread.
    """

    def __init__(self, send_timeout: float) -> None:
        self._send_timeout = send_timeout

    async def forward(self, client: ModelClient, scope: Scope, send: Send, body: bytes, query: bytes) -> None:
        """Forwards one request, and sends its response. The caller cancels it when the client disconnects.

        Args:
            client: The connections to the model server.
            scope, send: Of the client's request, whose body has been read.
            body: That body.
            query: The query to send.

        Raises:
            APIError: The model server ended before it responded (503).
        """
        try:
            async with client.connection() as connection:
                connection.send(request_head(scope, query, len(body)), body)
                await self.respond(connection, scope, send)
        except ConnectionLostError as e:
            raise APIError(
                503,
                "The model has stopped while it processed this request. The next request loads it again.",
                code="model_stopped",
                retry_after=1,
            ) from e

    async def respond(self, connection: HTTPConnection, scope: Scope, send: Send) -> None:
        """Sends the response that a connection receives to the client.

        Raises:
            ConnectionLostError: The server ended before the first byte of its response.
        """
        status, headers = await connection.read_head()
        format_of_stream = stream_format(_header(headers, b"content-type"))
        own: RequestConnection | None = scope.get("mvllm.connection")
        if own is not None and format_of_stream is not None:
            own.filler = format_of_stream.filler
        kept = [header for header in headers if header[0] not in _NOT_RETURNED]
        await send({"type": "http.response.start", "status": status, "headers": kept})
        with _SendTimer(self._send_timeout, own) as timer:
            try:
                async for part in connection.read_body():
                    timer.waiting_since = timer.time()
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                    timer.waiting_since = None
                await send({"type": "http.response.body", "body": b""})
            except ConnectionLostError:
                await _send_loss(scope, send, own, is_stream=format_of_stream is not None)


class _SendTimer:
    """Closes the client's connection when the client has read nothing for too long, which cancels its request.

    A timer that looks now and then costs less than one for each part.

    Attributes:
        waiting_since: Since when a part waits to be sent; None while none does.
    """

    def __init__(self, seconds: float, connection: RequestConnection | None) -> None:
        self._seconds = seconds
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self.waiting_since: float | None = None
        self.time = self._loop.time

    def __enter__(self) -> _SendTimer:
        self._timer = self._loop.call_later(self._seconds / 2, self._check)
        return self

    def __exit__(self, *unused: object) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        since = self.waiting_since
        if since is not None and self.time() - since > self._seconds and self._connection is not None:
            logger.info("A client has read nothing for %g s; its request is aborted.", self._seconds)
            self._connection.abort()
            return
        self._timer = self._loop.call_later(self._seconds / 2, self._check)


async def _send_loss(scope: Scope, send: Send, connection: RequestConnection | None, *, is_stream: bool) -> None:
    """Ends a response whose model server has died: a stream with an error, others by closing the connection."""
    if not is_stream:
        if connection is not None:
            connection.abort()
        return
    error = APIError(500, "The model has stopped while it generated this response.", code="model_stopped")
    body = api_format(scope).error_event(error, scope.get("mvllm.request_id"))
    await send({"type": "http.response.body", "body": body})


def request_head(scope: Scope, query: bytes, body_length: int, host: bytes | None = None) -> bytes:
    """The head of a request to a model server, with the client's headers and the router's request id.

    Args:
        host: The server's name for the header `Host`, in place of the router's. To the server, a page of the router is
            then a foreign one, so the origin of such a page is left out.
    """
    target: bytes = scope["raw_path"].partition(b"?")[0]
    if query:
        target += b"?" + query
    method: str = scope["method"]
    lines = [b"%s %s HTTP/1.1" % (method.encode(), target)]
    headers: Headers = [header for header in scope["headers"] if header[0] not in _NOT_FORWARDED]
    if host is not None:
        own = [value.decode("latin-1") for name, value in headers if name == b"host"]
        headers = [(b"host", host)] + [
            (name, value)
            for name, value in headers
            if name != b"host" and not (name == b"origin" and is_same_origin(value.decode("latin-1"), own))
        ]
    lines += [b"%s: %s" % header for header in headers]
    lines.append(b"x-request-id: " + scope["mvllm.request_id"].encode())
    if body_length or method not in ("GET", "DELETE"):
        lines.append(b"content-length: %d" % body_length)
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes:
    return next((value for key, value in headers if key == name), b"")

"""A small HTTP/1.1 client for benchmarks, on httptools, the parser that the server uses.

A benchmark reads hundreds of streams on the machine of the server, so the client must cost little: the body of a
response is passed on where the event loop receives it, once per read, and no task runs until the response has ended.
There are no redirects, cookies, proxies or compression.
"""

from __future__ import annotations

import asyncio
import base64
import re
import ssl
import time
from collections.abc import Callable, Mapping
from typing import cast
from urllib.parse import unquote, urlsplit

import httptools

from mvllm.extension_api import ConfigError

OnData = Callable[[bytes, float], None]
"""Called with new bytes of the body of a response with status 200, and the time of time.perf_counter when they came."""

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[^\x00\r\n]*")


class HTTPError(Exception):
    """A server could not be reached, or its response is incomplete or no valid HTTP."""


class HTTPClient:
    """Connections to one server, kept open for further requests. Used in one event loop.

    Args:
        base_url: A URL of the server; its path is not used. A user name and a password in it are sent.
        headers: Headers of every request.
        verify: Check the server's certificate.

    Raises:
        ConfigError: The URL or a header is not valid.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str], *, verify: bool = True) -> None:
        try:
            url = urlsplit(base_url)
            self._host, port = url.hostname or "", url.port
        except ValueError as e:
            raise ConfigError(f"{base_url!r} is not a URL: {e}.") from e
        if url.scheme not in ("http", "https") or not self._host:
            raise ConfigError(f"{base_url!r} is not a URL of a server. It looks like http://127.0.0.1:8000.")
        self._ssl = _ssl_context(verify) if url.scheme == "https" else None
        self._port = port or (443 if self._ssl else 80)
        all_headers = {"Host": url.netloc.rpartition("@")[2], **headers}
        if url.username is not None and "authorization" not in map(str.lower, all_headers):
            pair = f"{unquote(url.username)}:{unquote(url.password or '')}"
            all_headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
        self._head = "".join(f"{name}: {value}\r\n" for name, value in all_headers.items() if _check(name, value))
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()

    async def request(
        self, method: str, url: str, body: bytes = b"", on_data: OnData | None = None
    ) -> tuple[int, bytes]:
        """Sends a request and waits for the end of its response.

        Args:
            url: Of the same server.
            on_data: Receives the body of a response with status 200.

        Returns:
            Status and body; an empty body if `on_data` has received it.

        Raises:
            HTTPError: See there.
            Exception: What `on_data` raised; the connection is closed.
        """
        parts = urlsplit(url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        head = f"{method} {target} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        connection = self._pop_idle() or await self._connect()
        is_reusable = False
        try:
            result = await connection.exchange(head.encode("latin-1") + body, on_data)
            is_reusable = connection.is_reusable
            return result
        finally:
            if is_reusable:
                self._idle.append(connection)
            else:
                connection.close()
                self._open.discard(connection)

    def close(self) -> None:
        """Closes all connections."""
        for connection in self._open:
            connection.close()
        self._open.clear()
        self._idle.clear()

    def _pop_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection
            self._open.discard(connection)
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._ssl)
        except (OSError, UnicodeError) as e:
            raise HTTPError(f"cannot connect to {self._host}:{self._port}: {e}") from e
        self._open.add(connection)
        return connection


class _Connection(asyncio.Protocol):
    """One connection, with one request at a time.

    Attributes:
        is_reusable: Whether it can be used for a further request.
    """

    def __init__(self) -> None:
        self.is_reusable = False
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._response: asyncio.Future[tuple[int, bytes]] | None = None
        self._on_data: OnData | None = None

    async def exchange(self, request: bytes, on_data: OnData | None) -> tuple[int, bytes]:
        """Sends a request; returns status and body of the response. See `HTTPClient.request`."""
        assert self._transport is not None
        self.is_reusable = False
        self._on_data = on_data
        self._status = 0
        self._pieces: list[bytes] = []
        self._ends_with_connection = True
        self._is_complete = False
        self._response = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._response

    def close(self) -> None:
        """Closes it at once. Idempotent."""
        self.is_reusable = False
        if self._transport is not None:
            self._transport.abort()

    # --- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        if self._response is None or self._response.done():
            self.close()  # no request asks for it
            return
        try:
            self._parser.feed_data(data)
            if self._on_data is not None and self._pieces and self._status == 200:
                pieces, self._pieces = self._pieces, []
                self._on_data(pieces[0] if len(pieces) == 1 else b"".join(pieces), time.perf_counter())
        except httptools.HttpParserError as e:
            self._fail(HTTPError(f"the response is not valid HTTP: {e}"))
        except Exception as e:  # noqa: BLE001  (raised in the task that waits)
            self._fail(e)
        else:
            if self._is_complete:
                self.is_reusable = self._parser.should_keep_alive()
                self._response.set_result((self._status, b"".join(self._pieces)))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_reusable = False
        if self._response is None or self._response.done():
            return
        if self._status and self._ends_with_connection and exc is None:
            self._response.set_result((self._status, b"".join(self._pieces)))
            return
        what = "in the middle of" if self._status else "before"
        self._fail(HTTPError(f"the server closed the connection {what} the response" + (f": {exc}" if exc else "")))

    # --- called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._is_complete = self._status >= 200  # one below announces the response

    def _fail(self, error: Exception) -> None:
        assert self._response is not None
        if not self._response.done():
            self._response.set_exception(error)


def _ssl_context(verify: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _check(name: str, value: str) -> bool:
    if not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
        raise ConfigError(f"{name!r}: {value!r} is not a valid header.")
    return True

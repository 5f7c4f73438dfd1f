"""The connections of a benchmark to a server.

A benchmark reads hundreds of streams on the machine of the server, so its client must cost little.
"""

from __future__ import annotations

import asyncio
import base64
import re
import ssl
from collections.abc import Callable, Mapping
from urllib.parse import unquote, urlsplit

from mvllm.extension_api import ConfigError
from mvllm.extension_api.http_connection import ConnectionLostError, ConnectionPool, HTTPConnection

MAX_IDLE_SECONDS = 50.0
"""Less than the time after which `mvllm serve` closes an idle connection."""

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[^\x00\r\n]*")


class ServerConnections:
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
        self._pool = ConnectionPool(self._connect, MAX_IDLE_SECONDS)

    async def request(
        self, method: str, url: str, body: bytes = b"", on_body: Callable[[bytes], None] | None = None
    ) -> tuple[int, bytes]:
        """Sends a request and waits for the end of its response.

        Args:
            url: Of the same server.
            on_body: Receives the body of a response with status 200 where the event loop receives it: no task runs
                until the response has ended.

        Returns:
            Status and body; an empty body if `on_body` has received it.

        Raises:
            ConnectionLostError: See there.
            Exception: What `on_body` raised; the connection is closed.
        """
        parts = urlsplit(url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        head = f"{method} {target} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        async with self._pool.connection() as connection:
            connection.send(head.encode("latin-1"), body, on_body)
            status, _ = await connection.read_head()
            return status, b"".join([part async for part in connection.read_body()])

    def close(self) -> None:
        """Closes all connections."""
        self._pool.close()

    async def _connect(self) -> HTTPConnection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(HTTPConnection, self._host, self._port, ssl=self._ssl)
        except (OSError, UnicodeError) as e:
            raise ConnectionLostError(f"cannot connect to {self._host}:{self._port}: {e}") from e
        return connection


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

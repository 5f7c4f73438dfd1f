"""Servers at URLs, which a router chooses from."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from mvllm.extension_api import ConfigError
from mvllm.extension_api.http_connection import ConnectionLostError, ConnectionPool, HTTPConnection
from mvllm_router.model_client import MAX_IDLE_SECONDS

_CONNECT_SECONDS = 2.0
_UNREACHABLE_SECONDS = 5.0
"""How long a server that could not be reached is only asked if there is no other."""


class RemoteServer:
    """One server.

    Args:
        url: `http://HOST:PORT`.

    Raises:
        ConfigError: The URL has another form.

    Attributes:
        url: The URL.
        name: Host and port, as in the header Host.
        num_requests: Requests that it is answering for this router.
        connection: Opens a connection, as `ConnectionPool.connection`.
        close: Closes the connections.
    """

    def __init__(self, url: str) -> None:
        pool = ConnectionPool(self._connect, MAX_IDLE_SECONDS)
        self.connection, self.close = pool.connection, pool.close
        self.url = url
        self.num_requests = 0
        self._avoid_until = 0.0
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError as e:
            raise ConfigError(f"{url!r} is not a URL: {e}.") from e
        if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/") or parts.query:
            raise ConfigError(f"{url!r} must be the URL of a server without a path, such as http://127.0.0.1:8000.")
        self._host, self._port = parts.hostname, port or 80
        self.name = parts.netloc.rpartition("@")[2].encode("idna" if not parts.netloc.isascii() else "ascii")

    @property
    def is_avoided(self) -> bool:
        """Whether it could not be reached a moment ago."""
        return time.monotonic() < self._avoid_until

    def avoid(self) -> None:
        """Notes that it could not be reached."""
        self._avoid_until = time.monotonic() + _UNREACHABLE_SECONDS

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Counts a request while it is answered."""
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    async def _connect(self) -> HTTPConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                _, connection = await loop.create_connection(HTTPConnection, self._host, self._port)
                return connection
        except (OSError, TimeoutError) as e:
            raise ConnectionLostError(str(e)) from e


def by_load(servers: Sequence[RemoteServer]) -> list[RemoteServer]:
    """The servers in the order in which to try them: reachable ones first, then by their number of requests."""
    return sorted(servers, key=lambda server: (server.is_avoided, server.num_requests))

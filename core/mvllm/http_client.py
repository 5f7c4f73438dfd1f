"""The HTTP client of core and of packages beside it: httpx2, without proxies and settings of the environment.

`LimitedTransport` is for URLs that clients name: the caller says to which address a request goes, and how long a
response may be. Import this module where requests are sent: it takes a tenth of a second.
"""

from __future__ import annotations

import functools
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx2

FindAddress = Callable[[str, int], Awaitable[str]]
"""Host name and port, to the address to connect to."""


def open_client(timeout: float) -> httpx2.Client:
    """A client for servers that the user names. Redirects are not followed.

    Args:
        timeout: Seconds for a connection, and between two parts of a response.
    """
    return httpx2.Client(timeout=timeout, verify=_tls_context(), trust_env=False)


@functools.cache
def _tls_context() -> ssl.SSLContext:
    """Checks certificates with those of the system. Reading them takes longer than a small response."""
    return ssl.create_default_context()


class ResponseTooLongError(httpx2.ReadError):
    """A response has more bytes than allowed."""


class LimitedTransport(httpx2.AsyncHTTPTransport):
    """Limits the size of responses, and connects to the addresses that it is given.

    A name that resolves to another address a moment after it was checked gains nothing: the connection goes to the
    address, while the header Host and the certificate are those of the name.

    Args:
        max_bytes: Bytes of one response, or of one stream of events. They are counted as they are sent: no compression
            is asked for, and what a compressed response expands to is not limited.
        find_address: Finds and checks the address; None to connect to the name.
    """

    def __init__(self, max_bytes: int, find_address: FindAddress | None = None) -> None:
        super().__init__(verify=_tls_context(), trust_env=False)
        self._max_bytes = max_bytes
        self._find_address = find_address

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Sends a request. Raises what `find_address` raises, too."""
        headers = [(name, value) for name, value in request.headers.raw if name.lower() != b"accept-encoding"]
        url, extensions = request.url, dict(request.extensions)
        if self._find_address is not None:
            host = url.raw_host.decode("ascii")
            address = await self._find_address(host, url.port or (443 if url.scheme == "https" else 80))
            if url.scheme == "https":
                extensions["sni_hostname"] = host
            url = url.copy_with(host=address)
        opened: list[Any] = []

        async def note_connection(event: str, info: dict[str, Any]) -> None:
            if event == "connection.connect_tcp.complete":
                opened.append(info["return_value"])

        extensions["trace"] = note_connection
        headers.append((b"accept-encoding", b"identity"))
        changed = httpx2.Request(request.method, url, headers=headers, stream=request.stream, extensions=extensions)
        try:
            response = await super().handle_async_request(changed)
        except BaseException:
            for connection in opened:  # httpx2 leaves it open if its TLS handshake is cancelled
                await connection.aclose()
            raise
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _LimitedStream(response.stream, request, self._max_bytes)
        return response


class _LimitedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, request: httpx2.Request, max_bytes: int) -> None:
        self._stream = stream
        self._request = request
        self._max_bytes = max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = self._max_bytes
        async for part in self._stream:
            left -= len(part)
            if left < 0:
                message = f"The response has more than {self._max_bytes} bytes."
                raise ResponseTooLongError(message, request=self._request)
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()

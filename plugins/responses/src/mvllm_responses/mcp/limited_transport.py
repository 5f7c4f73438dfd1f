"""HTTP to tool servers within limits: the size of a response, and for URLs of requests public addresses only.

The address is checked where the connection is made, and the connection goes to the address that was checked: a name
that resolves to another address a moment later gains nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx2

from mvllm.extension_api.http import is_public, start_resolving

MAX_RESPONSE_BYTES = 16 << 20
"""Bytes of one HTTP response, or of one stream of events."""

_RESOLVE_SECONDS = 10.0


class LimitedTransport(httpx2.AsyncHTTPTransport):
    """Limits the size of responses, and connects to public addresses only if asked to.

    Args:
        public_only: Whether to refuse addresses that are not public.
    """

    def __init__(self, *, public_only: bool) -> None:
        super().__init__(trust_env=False)
        self._public_only = public_only

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Sends a request.

        Raises:
            httpx2.ConnectError: The address is not public.
        """
        # What a compressed response expands to is not limited.
        headers = [(k, v) for k, v in request.headers.raw if k.lower() != b"accept-encoding"]
        url, extensions = request.url, dict(request.extensions)
        if self._public_only:
            address = await public_address(url.host, url.port or (443 if url.scheme == "https" else 80))
            if url.scheme == "https":
                extensions["sni_hostname"] = url.host
            url = url.copy_with(host=address)
        checked = httpx2.Request(
            request.method,
            url,
            headers=[*headers, (b"accept-encoding", b"identity")],
            stream=request.stream,
            extensions=extensions,
        )
        response = await super().handle_async_request(checked)
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.aclose()
            raise httpx2.ReadError("The server compressed its response without being asked to.", request=request)
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _LimitedStream(response.stream, request)
        return response


class _LimitedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, request: httpx2.Request) -> None:
        self._stream = stream
        self._request = request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = MAX_RESPONSE_BYTES
        async for part in self._stream:
            left -= len(part)
            if left < 0:
                raise httpx2.ReadError(f"The response has more than {MAX_RESPONSE_BYTES} bytes.", request=self._request)
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


async def public_address(host: str, port: int) -> str:
    """The address of a host, if all its addresses are public.

    Raises:
        httpx2.ConnectError: One of them is not, or the host is not known.
    """
    try:
        async with asyncio.timeout(_RESOLVE_SECONDS):
            addresses = await asyncio.wrap_future(start_resolving(host, port))
    except (OSError, UnicodeError, TimeoutError) as e:
        raise httpx2.ConnectError(f"The address of {host!r} cannot be found.") from e
    if not addresses or not all(map(is_public, addresses)):
        raise httpx2.ConnectError(
            f"{host!r} is not a public address; this server connects to others only if its operator names them."
        )
    return addresses[0]

"""HTTP to tool servers within limits: the size of a response, and for URLs of requests public addresses only."""

from __future__ import annotations

import asyncio

import httpx2

from mvllm.extension_api.http_client import LimitedTransport, is_public, start_resolving

MAX_RESPONSE_BYTES = 16 << 20
"""Bytes of one HTTP response, or of one stream of events."""

_RESOLVE_SECONDS = 10.0


class ToolServerTransport(LimitedTransport):
    """Limits the size of responses, and connects to public addresses only if asked to.

    Args:
        public_only: Whether to refuse addresses that are not public.
    """

    def __init__(self, *, public_only: bool) -> None:
        super().__init__(MAX_RESPONSE_BYTES, public_address if public_only else None)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Sends a request.

        Raises:
            httpx2.ConnectError: The address is not public.
            httpx2.ReadError: The response is compressed: what it expands to is not limited.
        """
        response = await super().handle_async_request(request)
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.aclose()
            raise httpx2.ReadError("The server compressed its response without being asked to.", request=request)
        return response


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

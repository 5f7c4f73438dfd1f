"""Fetches the content of URLs that clients name, without reaching into the network of the server.

A URL of a client may name anything that the server reaches and the client does not: a service on this machine, a
database of the local network, the metadata of a cloud. So:

    scheme       http and https only; no user name or password in the URL
    host         with a list of allowed hosts: one of them, and it may have any address
                 without: every address of its name must be public
    connection   to the address that was checked, so a second answer of the name service cannot replace it
    redirects    checked like the first URL, at most MAX_REDIRECTS
    size, time   limited while reading, whatever the headers say; the time from the name service to the last byte

Settings of proxies in the environment are not used: a proxy would choose the address.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urljoin, urlsplit

from mvllm.errors import RequestError
from mvllm.multimodal.public_addresses import is_public, start_resolving

if TYPE_CHECKING:
    import httpx2

MAX_REDIRECTS = 5
MAX_URL_LENGTH = 8192
_REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS = {"Accept": "*/*", "User-Agent": "mvllm"}
_MAX_SHOWN = 80

Resolve = Callable[[str, int], Sequence[str]]
"""Host name and port, to addresses."""


def fetch_url(
    url: str,
    *,
    allowed_hosts: Sequence[str] | None,
    timeout: float,
    max_bytes: int,
    resolve: Resolve | None = None,
) -> bytes:
    """The content of a URL. Blocks.

    Args:
        allowed_hosts: Hosts that may be reached, whatever their address; None for every public address.
        timeout: Seconds for all of it.
        max_bytes: Most bytes of the content.
        resolve: Replaces the name service.

    Raises:
        RequestError: The URL is not allowed, or its content cannot be had within the limits.
    """
    fetch = partial(asyncio.run, _fetch(url, allowed_hosts, timeout, max_bytes, resolve))
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return fetch()
    with ThreadPoolExecutor(1) as thread:  # of a caller within an event loop
        return thread.submit(fetch).result()


async def _fetch(
    url: str, allowed_hosts: Sequence[str] | None, timeout: float, max_bytes: int, resolve: Resolve | None
) -> bytes:
    import httpx2

    from mvllm.http_client import LimitedTransport, ResponseTooLongError

    async def find_address(host: str, port: int) -> str:
        return await _address_of(url, host, port, allowed_hosts, resolve)

    transport = LimitedTransport(max_bytes, find_address)
    try:
        async with (
            asyncio.timeout(timeout),
            httpx2.AsyncClient(transport=transport, headers=_HEADERS, timeout=None, trust_env=False) as client,
        ):
            for _ in range(MAX_REDIRECTS + 1):
                _check_url(url, allowed_hosts)
                client.cookies.clear()  # what a redirect sets is not sent
                async with client.stream("GET", url) as response:
                    target = _redirect_of(response, url)
                    if target is None:
                        assert isinstance(response.stream, httpx2.AsyncByteStream)
                        return b"".join([part async for part in response.stream])  # as it was sent
                url = target
    except RequestError:
        raise
    except TimeoutError as e:
        raise _error(url, "it took too long") from e
    except ResponseTooLongError as e:
        raise _error(url, f"it has more than {max_bytes} bytes") from e
    except httpx2.RemoteProtocolError as e:
        raise _error(url, f"the connection ended before its content: {e}") from e
    except (OSError, httpx2.HTTPError, httpx2.InvalidURL, ValueError) as e:
        raise _error(url, f"{type(e).__name__}: {e}" if str(e) else type(e).__name__) from e
    raise _error(url, f"more than {MAX_REDIRECTS} redirects")


def _redirect_of(response: httpx2.Response, url: str) -> str | None:
    """Where a response leads to; None if it has the content.

    Raises:
        RequestError: It is an error, or leads to no valid URL.
    """
    if response.status_code == 200:
        return None
    if response.status_code not in _REDIRECTS:
        raise _error(url, f"the host answered with status {response.status_code}")
    target = response.headers.get("location")
    if not target:
        raise _error(url, "a redirect without a target")
    try:
        return urljoin(url, target)
    except ValueError as e:
        raise _error(url, f"it redirects to no valid URL: {e}") from e


def _check_url(url: str, allowed_hosts: Sequence[str] | None) -> None:
    if len(url) > MAX_URL_LENGTH:
        raise RequestError(f"A URL may have {MAX_URL_LENGTH} characters.", parameter="multi_modal_data")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as e:
        raise _error(url, f"it is not a valid URL: {e}") from e
    if parts.scheme not in ("http", "https"):
        raise _error(url, "only the schemes http and https are fetched")
    if not host or "\\" in url or any(ord(each) <= 32 or ord(each) == 127 for each in url):
        raise _error(url, "it is not a valid URL")
    if "@" in parts.netloc:
        raise _error(url, "URLs with a user name or password are not fetched")
    if port == 0:
        raise _error(url, "port 0 does not exist")
    if allowed_hosts is not None and host.rstrip(".") not in {each.lower().rstrip(".") for each in allowed_hosts}:
        raise _error(url, f"the host {host[:_MAX_SHOWN]!r} is not in allowed_media_domains")


async def _address_of(
    url: str, host: str, port: int, allowed_hosts: Sequence[str] | None, resolve: Resolve | None
) -> str:
    """The address to connect to.

    Raises:
        RequestError: The name has none, or one that is not public.
    """
    try:
        if resolve is not None:
            addresses = list(resolve(host, port))
        else:
            addresses = await asyncio.wrap_future(start_resolving(host, port))
    except (OSError, UnicodeError) as e:
        raise _error(url, f"its host cannot be resolved: {e}") from e
    if not addresses:
        raise _error(url, "its host has no address")
    if allowed_hosts is None and not all(map(is_public, addresses)):
        raise _error(
            url,
            "its host has an address that is not public; the server's operator can allow hosts with "
            "--allowed-media-domains",
        )
    return addresses[0]


def _error(url: str, reason: str) -> RequestError:
    shown = ascii(url[:_MAX_SHOWN])[1:-1] + ("..." if len(url) > _MAX_SHOWN else "")
    return RequestError(f"The URL {shown} cannot be fetched: {reason}.", parameter="multi_modal_data")

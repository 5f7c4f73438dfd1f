"""Fetches the content of URLs that clients name, without reaching into the network of the server.

A URL of a client may name anything that the server reaches and the client does not: a service on this machine, a
database of the local network, the metadata of a cloud. So:

    scheme       http and https only; no user name or password in the URL
    host         with a list of allowed hosts: one of them, and it may have any address
                 without: every address of its name must be public
    connection   to the address that was checked, so a second answer of the name service cannot replace it
    redirects    checked like the first URL, at most MAX_REDIRECTS
    size, time   limited while reading, whatever the headers say

Settings of proxies in the environment are not used: a proxy would choose the address.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from urllib.parse import SplitResult, urljoin, urlsplit

from mvllm.errors import RequestError

MAX_REDIRECTS = 5
MAX_URL_LENGTH = 8192
_CHUNK = 1 << 16
_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_SHOWN = 80

Resolve = Callable[[str, int], Sequence[str]]
"""Host name and port to addresses."""


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
    deadline = time.monotonic() + timeout
    for _ in range(MAX_REDIRECTS + 1):
        parts = _check_url(url, allowed_hosts)
        address = _address_of(parts, allowed_hosts, resolve or _resolve)
        connection = _connect(parts, address, deadline, url)
        # Reads have a limit of time each; a host that sends a byte now and then would never reach it.
        end = threading.Timer(max(0.0, deadline - time.monotonic()), _shut_down, [connection.sock])
        end.daemon = True
        end.start()
        try:
            found = _get(connection, parts, deadline, max_bytes, url)
        except (OSError, http.client.HTTPException, ValueError) as e:
            raise _error(url, "it took too long" if time.monotonic() >= deadline else _reason(e)) from e
        finally:
            end.cancel()
            connection.close()
        if isinstance(found, bytes):
            return found
        try:
            url = urljoin(url, found)
        except ValueError as e:
            raise _error(url, f"it redirects to no valid URL: {e}") from e
    raise _error(url, f"more than {MAX_REDIRECTS} redirects")


def _check_url(url: str, allowed_hosts: Sequence[str] | None) -> SplitResult:
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
    return parts


def _port_of(parts: SplitResult) -> int:
    return parts.port or (443 if parts.scheme == "https" else 80)


def _address_of(parts: SplitResult, allowed_hosts: Sequence[str] | None, resolve: Resolve) -> str:
    """The address to connect to.

    Raises:
        RequestError: The name has none, or one that is not public.
    """
    host = parts.hostname or ""
    try:
        addresses = list(resolve(host, _port_of(parts)))
    except (OSError, UnicodeError) as e:
        raise _error(parts.geturl(), f"its host cannot be resolved: {e}") from e
    if not addresses:
        raise _error(parts.geturl(), "its host has no address")
    if allowed_hosts is None and not all(map(is_public, addresses)):
        raise _error(
            parts.geturl(),
            "its host has an address that is not public; the server's operator can allow hosts with "
            "--allowed-media-domains",
        )
    return addresses[0]


def is_public(address: str) -> bool:
    """Whether an IP address can be reached by everyone: not private, loopback, link-local, multicast or reserved."""
    try:
        parsed = ipaddress.ip_address(address.split("%")[0])
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = parsed.ipv4_mapped or parsed.sixtofour or (parsed.teredo[1] if parsed.teredo else None)
        if inner is None and parsed in _NAT64:
            inner = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if parsed not in _GLOBAL_UNICAST:
            return False
    if any(parsed in network for network in _SPECIAL if network.version == parsed.version):
        return False
    return parsed.is_global and not parsed.is_multicast and not parsed.is_reserved


_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
"""All that is assigned for public use. Outside of it `ipaddress` calls some blocks global, such as fec0::/10."""
_SPECIAL = tuple(
    map(
        ipaddress.ip_network,
        # Protocol assignments (a cloud's metadata are at 192.0.0.192), relays of 6to4, a cloud's service of its hosts,
        # documentation. Which of them `ipaddress` knows depends on the version of Python.
        ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32", "2001:db8::/32", "3fff::/20"),
    )
)


def _resolve(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(each[4][0]) for each in found]


def _connect(parts: SplitResult, address: str, deadline: float, url: str) -> http.client.HTTPConnection:
    """A connection to `address` that speaks to the host of the URL."""
    host, port = parts.hostname or "", _port_of(parts)
    try:
        sock = socket.create_connection((address, port), timeout=_left(deadline))
        try:
            if parts.scheme == "https":
                sock = ssl.create_default_context().wrap_socket(sock, server_hostname=host)
        except BaseException:
            sock.close()
            raise
    except (OSError, ValueError) as e:
        raise _error(url, _reason(e)) from e
    connection = http.client.HTTPConnection(host, port)
    connection.default_port = _port_of(urlsplit(f"{parts.scheme}:"))  # left out of the header Host, which may be signed
    connection.sock = sock
    return connection


def _get(
    connection: http.client.HTTPConnection, parts: SplitResult, deadline: float, max_bytes: int, url: str
) -> bytes | str:
    """The content, or the URL to which it redirects."""
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    connection.request("GET", path, headers={"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "mvllm"})
    connection.sock.settimeout(_left(deadline))
    response = connection.getresponse()
    if response.status in _REDIRECTS:
        target = response.getheader("Location")
        if not target:
            raise _error(url, "a redirect without a target")
        return target
    if response.status != 200:
        raise _error(url, f"the host answered with status {response.status}")
    pieces, size = [], 0
    while True:
        if connection.sock is not None:  # closed by the library at the end of a response without length
            connection.sock.settimeout(_left(deadline))
        else:
            _left(deadline)
        piece = response.read1(_CHUNK)
        if not piece:
            break
        size += len(piece)
        if size > max_bytes:
            raise _error(url, f"it has more than {max_bytes} bytes")
        pieces.append(piece)
    _left(deadline)  # at the deadline the connection is shut down, which looks like the end of a content without length
    if response.length:
        raise _error(url, "the connection ended before its content")
    return b"".join(pieces)


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it took too long"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _error(url: str, reason: str) -> RequestError:
    shown = ascii(url[:_MAX_SHOWN])[1:-1] + ("..." if len(url) > _MAX_SHOWN else "")
    return RequestError(f"The URL {shown} cannot be fetched: {reason}.", parameter="multi_modal_data")

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

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from urllib.parse import SplitResult, urljoin, urlsplit

from mvllm.errors import RequestError
from mvllm.multimodal.public_addresses import is_public, start_resolving

MAX_REDIRECTS = 5
MAX_URL_LENGTH = 8192
_CHUNK = 1 << 16
_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_SHOWN = 80

Resolve = Callable[[str, int, float], Sequence[str]]
"""Host name, port and the seconds that it may take, to addresses."""


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
        try:
            address = _address_of(parts, allowed_hosts, resolve or _resolve, deadline)
            with contextlib.closing(_open(address, parts, deadline)) as sock, _shut_down_at(deadline, sock):
                found = _get(_speak_to(sock, parts), parts, deadline, max_bytes, url)
        except RequestError:
            raise
        except (OSError, http.client.HTTPException, ValueError) as e:
            raise _error(url, "it took too long" if time.monotonic() >= deadline else _reason(e)) from e
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


def _address_of(parts: SplitResult, allowed_hosts: Sequence[str] | None, resolve: Resolve, deadline: float) -> str:
    """The address to connect to.

    Raises:
        RequestError: The name has none, or one that is not public.
        TimeoutError: The name service has not answered in time.
    """
    host = parts.hostname or ""
    try:
        addresses = list(resolve(host, _port_of(parts), _left(deadline)))
    except TimeoutError:
        raise
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


def _resolve(host: str, port: int, seconds: float) -> list[str]:
    return start_resolving(host, port).result(seconds)


def _open(address: str, parts: SplitResult, deadline: float) -> socket.socket:
    """A connection to an address. With https it has not shaken hands yet: that takes as long as the host wants."""
    sock = socket.create_connection((address, _port_of(parts)), timeout=_left(deadline))
    if parts.scheme == "http":
        return sock
    try:
        context = ssl.create_default_context()
        return context.wrap_socket(sock, server_hostname=parts.hostname, do_handshake_on_connect=False)
    except BaseException:
        sock.close()
        raise


@contextlib.contextmanager
def _shut_down_at(deadline: float, sock: socket.socket) -> Iterator[None]:
    """Ends a connection at the deadline: a host that sends a byte now and then never reaches the limit of one read."""
    end = threading.Timer(max(0.0, deadline - time.monotonic()), _shut_down, [sock])
    end.daemon = True
    end.start()
    try:
        yield
    finally:
        end.cancel()


def _speak_to(sock: socket.socket, parts: SplitResult) -> http.client.HTTPConnection:
    """HTTP over a connection, to the host of the URL."""
    if isinstance(sock, ssl.SSLSocket):
        sock.do_handshake()
    connection = http.client.HTTPConnection(parts.hostname or "", _port_of(parts))
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
    with connection.getresponse() as response:
        return _content(response, connection, deadline, max_bytes, url)


def _content(
    response: http.client.HTTPResponse,
    connection: http.client.HTTPConnection,
    deadline: float,
    max_bytes: int,
    url: str,
) -> bytes | str:
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
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # of TLS, too, without changing what another thread reads


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

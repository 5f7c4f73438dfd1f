"""Which addresses URLs of clients may reach, and a name service with a deadline.

There is one filter for everything that is fetched for clients: images, audio, videos and tool servers.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from concurrent.futures import Future

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


def start_resolving(host: str, port: int) -> Future[list[str]]:
    """The addresses of a host. The future cannot be cancelled: a caller that has waited long enough leaves it.

    A name service that does not answer holds its caller for half a minute, whatever the caller's deadline is. So each
    name has a thread of its own, and no pool of threads can be used up by such names.
    """
    future: Future[list[str]] = Future()
    future.set_running_or_notify_cancel()

    def resolve() -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            future.set_result([str(each[4][0]) for each in found])
        except BaseException as e:  # noqa: BLE001  (raised by the future)
            future.set_exception(e)

    threading.Thread(target=resolve, name="resolve", daemon=True).start()
    return future

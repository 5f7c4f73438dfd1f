"""Keeps foreign web pages from using a server without API keys, by the headers that only browsers decide.

A page can send requests to every address that its browser reaches, also to 127.0.0.1. Two ways lead to the server:

    DNS rebinding    the name of the page resolves to 127.0.0.1 a moment later; to the browser the server is the page's
                     own origin, but `Host` has the page's name
    cross-site       a request of a kind that needs no permission (CORS); `Origin` has the page's origin

`Host` is checked where the server listens on the loopback address: elsewhere it has names that it does not know. An
address in `Host` is no sign of rebinding, which needs a name. A program that is no browser sends no `Origin`.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from mvllm.entrypoints.openai.common.errors import APIError
from mvllm.entrypoints.openai.server.listener import is_public
from mvllm.entrypoints.openai.server.settings import ServerSettings

Headers = Iterable[tuple[bytes, bytes]]

_LOCAL_DOMAINS = ("localhost", "local", "internal")
"""Domains that nobody can register: `host.docker.internal` is this machine's name in containers."""
_SAME_ORIGIN = (b"same-origin", b"none")
_MAX_SHOWN = 100


class BrowserCheck:
    """Refuses requests of foreign pages.

    Args:
        settings: The names and origins that are allowed.
        checks_host: Whether requests must name one of these hosts.
        checks_origin: Whether they must come from one of these origins.
    """

    def __init__(self, settings: ServerSettings, *, checks_host: bool, checks_origin: bool) -> None:
        self._checks_host = checks_host
        self._checks_origin = checks_origin
        self._names = {"localhost", socket.gethostname().lower(), settings.host.lower()}
        self._names |= {name.lower().rstrip(".") for name in settings.allowed_hosts}
        self._origins = settings.allowed_origins

    @classmethod
    def create(
        cls, settings: ServerSettings, listener: socket.socket | None, *, checks_origin: bool = True
    ) -> BrowserCheck | None:
        """The check of a server; None for one that needs none: it has API keys, or a proxy or a router is its client.

        Args:
            listener: What the server listens on; None for neither host nor port.
            checks_origin: False if servers behind it check the origins.
        """
        if settings.api_keys or settings.router_key is not None or listener is None:
            return None
        if listener.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        checks_host = not is_public(listener) or bool(settings.allowed_hosts)
        return cls(settings, checks_host=checks_host, checks_origin=checks_origin)

    def check(self, headers: Headers) -> None:
        """Checks a request without a key.

        Raises:
            APIError: It comes from a page that is not allowed (403).
        """
        hosts, origins, site = [], [], b""
        for name, value in headers:
            if name == b"host":
                hosts.append(value.decode("latin-1"))
            elif name == b"origin":
                origins.append(value.decode("latin-1"))
            elif name == b"sec-fetch-site":
                site = value
        if self._checks_host:
            for host in hosts:
                if not self._is_own_host(host):
                    raise _refused(
                        "host", host, "is not a name of this server. Start it with --allowed-hosts to allow it"
                    )
        if not self._checks_origin or site in _SAME_ORIGIN:  # pages cannot set it
            return
        for origin in origins:
            if not self._is_allowed_origin(origin, hosts):
                raise _refused(
                    "origin", origin, "may not send requests. Start the server with --allowed-origins to allow it"
                )

    def _is_own_host(self, host: str) -> bool:
        name = _host_name(f"//{host}")
        if name is None:
            return False
        if "*" in self._names:
            return True
        return name == "" or self._is_own_name(name) or _is_address(name) or name.endswith(_DOMAIN_ENDS)

    def _is_allowed_origin(self, origin: str, hosts: Iterable[str]) -> bool:
        if origin in self._origins or "*" in self._origins:
            return True
        scheme, separator, _ = origin.partition("://")
        if scheme.lower() not in ("http", "https"):
            return bool(separator)  # an app or a browser's extension; pages without an origin have `null`
        name = _host_name(origin)
        if name is None or is_same_origin(origin, hosts):
            return name is not None
        return self._is_own_name(name) or (_is_address(name) and _is_this_machine(name))

    def _is_own_name(self, name: str) -> bool:
        if name in self._names or name.endswith(".localhost"):
            return True
        return any(own.startswith("*.") and name.endswith(own[1:]) for own in self._names)


def is_same_origin(origin: str, hosts: Iterable[str]) -> bool:
    """Whether `Origin` is that of a page of the server itself. A proxy may have changed the scheme."""
    return origin.partition("://")[2] in hosts


_DOMAIN_ENDS = tuple(f".{domain}" for domain in _LOCAL_DOMAINS)


def _host_name(url: str) -> str | None:
    """The host of a URL in lower case, empty if there is none; None if it is not valid."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  (raises if it is not valid)
    except ValueError:
        return None
    return None if "@" in parts.netloc else (parts.hostname or "").rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_this_machine(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    return parsed.is_loopback or parsed.is_unspecified


def _refused(what: str, value: str, why: str) -> APIError:
    shown = ascii(value[:_MAX_SHOWN])[1:-1]
    return APIError(
        403,
        f"This server has no API keys, and the {what} {shown!r} of this request {why}.",
        code=f"{what}_not_allowed",
    )

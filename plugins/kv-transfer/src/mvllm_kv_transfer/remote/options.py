"""Options of the connectors between engines (`kv_connector_extra_config`)."""

from __future__ import annotations

import difflib
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from mvllm.extension_api import ConfigError

_T = TypeVar("_T", bound="RemoteOptions")


@dataclass(frozen=True)
class RemoteOptions:
    """Options of every connector between engines.

    Attributes:
        hold_seconds: How long a producer holds the blocks of a finished request for a consumer.
        max_held_fraction: Fraction of the host blocks that a producer holds at most.
        step_seconds: Time that one step of a transfer may take: a connection, a message, or 1 MiB of a block.
        lookup_seconds: Time after which a consumer computes a prompt, if its producer has not said what it has.
        transfer_seconds: Time that fetching the blocks of one request may take.
    """

    hold_seconds: float = 60.0
    max_held_fraction: float = 0.5
    step_seconds: float = 5.0
    lookup_seconds: float = 5.0
    transfer_seconds: float = 30.0

    @classmethod
    def read(cls: type[_T], options: Mapping[str, Any], connector: str) -> _T:
        """The options of a connector.

        Raises:
            ConfigError: One is not known, or has a wrong type or value.
        """
        known = {each.name: each.default for each in fields(cls)}
        for name, value in options.items():
            where = f"kv_connector_extra_config of the connector {connector!r}"
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(known)}."
                raise ConfigError(f"{where} has an unknown option {name!r}. {hint}")
            default = known[name]
            if isinstance(default, float):
                ok = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
                if not ok or (name == "max_held_fraction" and value > 1):
                    limit = " up to 1" if name == "max_held_fraction" else ""
                    raise ConfigError(f"{where}: {name} must be a number above 0{limit}, not {value!r}.")
            elif isinstance(default, tuple):
                if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
                    raise ConfigError(f"{where}: {name} must be a list of texts, not {value!r}.")
            elif type(value) is not type(default) and not (default is None and isinstance(value, str)):
                kind = "an integer" if isinstance(default, int) else "a text"
                raise ConfigError(f"{where}: {name} must be {kind}, not {value!r}.")
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in options.items()}
        return cls(**values)


class AllowedPeers:
    """The engines that requests may name.

    Args:
        peers: Each is HOST:PORT, HOST:FIRST-LAST (ports of several engines), HOST (any port), or a network such as
            10.1.0.0/16 (any port).

    Raises:
        ConfigError: One is none of these.
    """

    def __init__(self, peers: tuple[str, ...]) -> None:
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        self._ports: dict[str, list[range]] = {}  # by host
        for peer in peers:
            self._add(peer)

    def _add(self, peer: str) -> None:
        if "/" in peer:
            try:
                self._networks.append(ipaddress.ip_network(peer))
            except ValueError as e:
                raise ConfigError(f"peers: {peer!r} is not a network: {e}.") from e
            return
        host, separator, text = peer.rpartition(":")
        ports = _ports(text) if host and (":" not in host or host.startswith("[")) else None
        if ports is None and peer and (not separator or _is_ip(peer.strip("[]"))):
            host, ports = peer, _ANY_PORT
        if ports is None:
            raise ConfigError(
                f"peers: {peer!r} must be HOST:PORT, HOST:FIRST-LAST, HOST, or a network such as 10.1.0.0/16."
            )
        self._ports.setdefault(host.strip("[]"), []).append(ports)

    def allow(self, host: str, port: int) -> bool:
        """Whether requests may name this engine."""
        if host in self._ports:
            return any(port in ports for ports in self._ports[host])
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return any(address in network for network in self._networks)


_ANY_PORT = range(1, 1 << 16)


def _ports(text: str) -> range | None:
    """The ports in `7000` or `7000-7007`; None if it is neither."""
    first, separator, last = text.partition("-")
    if not all(part.isascii() and part.isdecimal() for part in (first, last if separator else first)):
        return None
    ports = range(int(first), int(last if separator else first) + 1)
    return ports if ports and ports[0] in _ANY_PORT and ports[-1] in _ANY_PORT else None


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True

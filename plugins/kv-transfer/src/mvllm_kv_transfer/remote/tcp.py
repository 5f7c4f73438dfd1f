"""The connector `tcp`: blocks from an engine on another machine."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mvllm.extension_api import ConfigError
from mvllm.extension_api.kv_transfer import HostBlock, KVConnectorContext
from mvllm_kv_transfer.remote.channel import Channel, ChannelError
from mvllm_kv_transfer.remote.messages import Blocks
from mvllm_kv_transfer.remote.options import AllowedPeers, RemoteOptions
from mvllm_kv_transfer.remote.remote_connector import RemoteConnector
from mvllm_kv_transfer.remote.transport import Address, Connection, Transport, host_bytes

KEY_VARIABLE = "MVLLM_KV_TRANSFER_KEY"
_MIN_KEY_BYTES = 16
_MAX_HOST_LENGTH = 255
_BACKLOG = 128


@dataclass(frozen=True)
class TCPOptions(RemoteOptions):
    """Options of the connector `tcp`.

    Attributes:
        host: Address at which a producer listens.
        port: Its port; 0 chooses a free one.
        advertised_host: Address of the producer for consumers; by default `host`.
        peers: Producers that a consumer connects to, see AllowedPeers; a consumer needs some. Requests that name
            others are computed.
        key_file: File with the key that both engines share; by default the variable MVLLM_KV_TRANSFER_KEY has the key.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertised_host: str | None = None
    peers: tuple[str, ...] = ()
    key_file: str | None = None


@dataclass(frozen=True)
class TCPAddress:
    """Where a producer listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class TCPConnector(RemoteConnector):
    """Fetches blocks over TCP. Both engines have a shared key; see TCPOptions."""

    def __init__(self, context: KVConnectorContext) -> None:
        options = TCPOptions.read(context.options, "tcp")
        super().__init__(context, options, TCPTransport(context, options))


class TCPTransport(Transport):
    """Connections over TCP, authenticated by a key (see `channel.py`).

    Args:
        context: The engine's.
        options: The connector's.

    Raises:
        ConfigError: There is no key, no listening at this address, or a consumer without peers.
    """

    def __init__(self, context: KVConnectorContext, options: TCPOptions) -> None:
        self._context = context
        self.seconds = options.step_seconds
        self._key = read_key(options.key_file)
        self._peers = AllowedPeers(options.peers)
        if not options.peers and context.role in ("consumer", "both"):
            raise ConfigError(
                f"The KV connector 'tcp' or 'nixl' in the role {context.role!r} uses only producers that `peers` "
                "in kv_connector_extra_config names, because requests say where their blocks are. Name them, for "
                'example "peers": ["10.0.0.1:7000"], or choose the kv_role \'producer\'.'
            )
        self._advertised_host = options.advertised_host or options.host
        if context.role == "consumer":
            return
        if options.advertised_host is None and options.host in ("0.0.0.0", "::", ""):  # noqa: S104  (compared only)
            raise ConfigError(
                f"The KV connector 'tcp' listens at {options.host!r}, all addresses of this machine, so consumers do "
                "not know which to use. Set advertised_host in kv_connector_extra_config."
            )
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((options.host, options.port))
            listener.listen(_BACKLOG)
        except (OSError, OverflowError) as e:
            listener.close()
            raise ConfigError(
                f"The KV connector 'tcp' cannot listen at {options.host!r}, port {options.port}: "
                f"{getattr(e, 'strerror', None) or e}. Set host and port in kv_connector_extra_config."
            ) from e
        listener.setblocking(False)
        self.listener = listener
        self._port: int = listener.getsockname()[1]

    def location(self) -> Mapping[str, Any]:
        """See Transport."""
        return {"remote_host": self._advertised_host, "remote_port": self._port}

    def address_of(self, params: Mapping[str, Any]) -> TCPAddress:
        """See Transport."""
        host, port = params.get("remote_host"), params.get("remote_port")
        if not isinstance(host, str) or not 0 < len(host) <= _MAX_HOST_LENGTH:
            raise ValueError("remote_host must be a text")
        if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 1 << 16:
            raise ValueError("remote_port must be an integer from 1 to 65535")
        if not self._peers.allow(host, port):
            raise ValueError(
                f"the engine at {ascii(host)[1:-1]}:{port} is not one of `peers` in this engine's "
                "kv_connector_extra_config"
            )
        return TCPAddress(host, port)

    async def accept(self, channel: Channel) -> None:
        """See Transport."""
        _set_options(channel.sock)
        await channel.authenticate(self._key, is_server=True)

    async def connect(self, address: Address) -> Channel:
        """See Transport."""
        assert isinstance(address, TCPAddress)
        loop = asyncio.get_running_loop()
        sock: socket.socket | None = None
        try:
            async with asyncio.timeout(self.seconds):
                found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
                family, kind, protocol, _, target = found[0]
                sock = socket.socket(family, kind, protocol)
                sock.setblocking(False)
                await loop.sock_connect(sock, target)
                _set_options(sock)
            channel = Channel(sock, self.seconds)
            await channel.authenticate(self._key, is_server=False)
            return channel
        except BaseException as e:
            if sock is not None:
                sock.close()
            if isinstance(e, TimeoutError):
                raise ChannelError(f"cannot be reached within {self.seconds:g} s") from None
            if isinstance(e, OSError):
                raise ChannelError(f"cannot be reached ({e.strerror or e})") from e
            raise

    async def send_contents(self, channel: Channel, blocks: Sequence[HostBlock | None]) -> None:
        """See Transport."""
        await channel.send(Blocks([block is not None for block in blocks]))
        for block in blocks:
            if block is not None:
                await channel.send_frame(host_bytes(self._context, block).data)

    async def receive_contents(
        self, connection: Connection, blocks: Sequence[HostBlock], targets: Sequence[np.ndarray]
    ) -> list[bool]:
        """See Transport."""
        channel = connection.channel
        are_there = (await channel.receive(Blocks)).found
        if len(are_there) != len(blocks):
            raise ChannelError(f"answered {len(are_there)} of {len(blocks)} blocks")
        for target, is_there in zip(targets, are_there):
            if is_there:
                await channel.receive_frame_into(target.data)
        return are_there


def read_key(path: str | None) -> bytes:
    """The key that both engines share.

    Raises:
        ConfigError: There is none, or it is too short.
    """
    if path is None:
        key, where = os.environ.get(KEY_VARIABLE, "").strip().encode(), f"The variable {KEY_VARIABLE}"
        if not key:
            raise ConfigError(
                "The KV connector 'tcp' needs a key that both engines share. Write one into a file "
                "(`openssl rand -hex 32 > FILE`) and name it as key_file in kv_connector_extra_config, or set "
                f"{KEY_VARIABLE}."
            )
    else:
        where = f"The file {path!r} of key_file"
        try:
            key = Path(path).read_bytes().strip()
        except OSError as e:
            raise ConfigError(f"{where} cannot be read: {e.strerror}.") from e
    if len(key) < _MIN_KEY_BYTES:
        raise ConfigError(f"{where} has a key of {len(key)} bytes; it must have at least {_MIN_KEY_BYTES}.")
    return key


def _set_options(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

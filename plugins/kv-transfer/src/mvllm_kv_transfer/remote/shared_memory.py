"""The connector `shared_memory`: blocks from another engine of the same user on this machine.

The producer passes the descriptor of its host blocks over a Unix socket. The consumer maps them, and copies each block
directly. The socket has an abstract name, which disappears with the process.
"""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mvllm.extension_api import ConfigError
from mvllm.extension_api.kv_transfer import HostBlock, KVConnectorContext
from mvllm_kv_transfer.remote.channel import Channel, ChannelError, receive_descriptors, send_descriptors
from mvllm_kv_transfer.remote.leasing_transport import LeasingTransport
from mvllm_kv_transfer.remote.messages import Welcome
from mvllm_kv_transfer.remote.options import RemoteOptions
from mvllm_kv_transfer.remote.remote_connector import RemoteConnector
from mvllm_kv_transfer.remote.transport import Address, Connection

_CREDENTIALS = struct.Struct("3i")
_MAX_ID_LENGTH = 256
_BACKLOG = 128


@dataclass(frozen=True)
class SharedMemoryAddress:
    """The engine's id."""

    engine_id: str

    def __str__(self) -> str:
        return f"{ascii(self.engine_id)[1:-1]} on this machine"

    @property
    def name(self) -> bytes:
        """The abstract name of its socket."""
        return b"\0mvllm-kv-" + hashlib.sha256(self.engine_id.encode()).hexdigest()[:32].encode()


class SharedMemoryConnector(RemoteConnector):
    """Copies blocks from another engine of the same user on this machine; see RemoteOptions."""

    def __init__(self, context: KVConnectorContext) -> None:
        options = RemoteOptions.read(context.options, "shared_memory")
        super().__init__(context, options, SharedMemoryTransport(context, options.step_seconds))


class SharedMemoryTransport(LeasingTransport):
    """Connections over Unix sockets; the peer must belong to the same user.

    Args:
        context: The engine's.
        seconds: See Transport.

    Raises:
        ConfigError: There are no such sockets here, or another engine has this id.
    """

    def __init__(self, context: KVConnectorContext, seconds: float) -> None:
        self.seconds = seconds
        self._blocks, self._states = context.blocks, context.states
        if context.role == "consumer":
            return
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(SharedMemoryAddress(context.engine_id).name)
            listener.listen(_BACKLOG)
        except OSError as e:
            listener.close()
            raise ConfigError(
                f"The KV connector 'shared_memory' cannot listen for the engine {context.engine_id!r}: "
                f"{e.strerror or e}. It needs Linux, and engine ids that differ."
            ) from e
        listener.setblocking(False)
        self.listener = listener

    def location(self) -> Mapping[str, Any]:
        """See Transport."""
        return {}

    def address_of(self, params: Mapping[str, Any]) -> SharedMemoryAddress:
        """See Transport."""
        engine_id = params.get("remote_engine_id")
        if not isinstance(engine_id, str) or not 0 < len(engine_id) <= _MAX_ID_LENGTH or not engine_id.isprintable():
            raise ValueError("remote_engine_id must be a text")
        return SharedMemoryAddress(engine_id)

    async def accept(self, channel: Channel) -> None:
        """See Transport."""
        _check_user(channel.sock)

    async def connect(self, address: Address) -> Channel:
        """See Transport."""
        assert isinstance(address, SharedMemoryAddress)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            async with asyncio.timeout(self.seconds):
                await asyncio.get_running_loop().sock_connect(sock, address.name)
            _check_user(sock)
        except BaseException as e:
            sock.close()
            if isinstance(e, TimeoutError):
                raise ChannelError(f"cannot be reached within {self.seconds:g} s") from None
            if isinstance(e, OSError):
                raise ChannelError(f"cannot be reached ({e.strerror or e})") from e
            raise
        return Channel(sock, self.seconds)

    async def after_welcome(self, channel: Channel) -> None:
        """Sends the descriptors of the host blocks."""
        caches = [cache for cache in (self._blocks, self._states) if cache is not None]
        await send_descriptors(channel, [cache.fileno() for cache in caches])

    async def open(self, channel: Channel, welcome: Welcome) -> Connection:
        """Maps the producer's host blocks."""
        sizes = [(welcome.num_blocks, self._blocks.block_bytes)]
        if self._states is not None:
            sizes.append((welcome.num_states, self._states.block_bytes))
        descriptors = await receive_descriptors(channel, len(sizes), self.seconds)
        try:
            arrays = [_map(descriptor, *size) for descriptor, size in zip(descriptors, sizes)]
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return _MappedConnection(channel, arrays[0], arrays[1] if len(arrays) > 1 else None)

    async def copy_blocks(
        self, connection: Connection, blocks: Sequence[HostBlock], targets: Sequence[np.ndarray], indices: Sequence[int]
    ) -> None:
        """See LeasingTransport."""
        assert isinstance(connection, _MappedConnection)
        for block, target, index in zip(blocks, targets, indices):
            source = connection.states if block.is_state else connection.blocks
            if source is None or index >= len(source):
                raise ChannelError(f"named the host block {index}, which it does not have")
            np.copyto(target, source[index])


class _MappedConnection(Connection):
    """A connection with the producer's host blocks: uint8 [num_blocks, block_bytes], read-only."""

    def __init__(self, channel: Channel, blocks: np.ndarray, states: np.ndarray | None) -> None:
        super().__init__(channel)
        self.blocks = blocks
        self.states = states


def _map(descriptor: int, num_blocks: int, block_bytes: int) -> np.ndarray:
    total = num_blocks * block_bytes
    if num_blocks < 1 or os.fstat(descriptor).st_size < total:
        raise ChannelError(f"has {num_blocks} host blocks in a file of {os.fstat(descriptor).st_size} bytes")
    if not total:  # of a model with states only
        return np.empty((num_blocks, 0), np.uint8)
    try:
        mapping = mmap.mmap(descriptor, total, prot=mmap.PROT_READ)
    except (OSError, ValueError) as e:
        raise ChannelError(f"has host blocks that cannot be mapped ({e})") from e
    return np.frombuffer(mapping, np.uint8).reshape(num_blocks, block_bytes)


def _check_user(sock: socket.socket) -> None:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.getuid():
        raise ChannelError(f"belongs to another user ({user})")

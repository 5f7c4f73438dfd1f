"""The consumer's side: asks producers for blocks, over connections that are kept for further requests."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence

import numpy as np

from mvllm.extension_api.kv_transfer import BlockKey, HostBlock
from mvllm_kv_transfer.remote.channel import Channel, ChannelError
from mvllm_kv_transfer.remote.messages import Fetch, Found, Hello, Lookup, Refused, Release, Welcome
from mvllm_kv_transfer.remote.transport import Address, Connection, Transport

_MAX_CONNECTIONS = 8
"""To one producer."""
_MAX_PEERS = 256
"""Producers that are known at once. Requests name them, so their number must not grow with the requests."""
_MAX_IDLE_SECONDS = 60.0
"""Less than the time after which a producer closes an idle connection."""
_UNREACHABLE_SECONDS, _REFUSED_SECONDS = 1.0, 30.0
"""How long a producer that cannot be reached, or that has refused, is not asked again."""


class _Peer:
    """What is known of one producer.

    Attributes:
        num_users: Requests to it in progress.
        idle: Unused connections, with the time since when each is unused.
    """

    def __init__(self) -> None:
        self.num_users = 0
        self.idle: list[tuple[float, Connection]] = []
        self.limit = asyncio.Semaphore(_MAX_CONNECTIONS)
        self.avoid_until = 0.0
        self.reason = ""


class BlockClient:
    """Asks producers. Used from the connector's thread.

    Args:
        transport: Makes connections.
        hello: What this engine says first.
    """

    def __init__(self, transport: Transport, hello: Hello) -> None:
        self._transport = transport
        self._hello = hello
        self._peers: dict[Address, _Peer] = {}  # the least recently used first
        self._cleanup: asyncio.TimerHandle | None = None

    @property
    def num_peers(self) -> int:
        """Producers that are known."""
        return len(self._peers)

    async def lookup(
        self, address: Address, request_id: str, keys: Sequence[BlockKey], seconds: float
    ) -> Sequence[bool]:
        """Which keys a producer has, after at most `seconds`.

        Args:
            request_id: The producer's id of the request whose blocks these are.

        Raises:
            ChannelError: It cannot be asked, or has refused.
        """
        started = time.monotonic()
        async with _limited(seconds):
            while True:
                async with self._connection(address) as (connection, is_used):
                    try:
                        remaining = seconds - (time.monotonic() - started)
                        await connection.channel.send(Lookup(request_id, list(keys), remaining / 2))
                        found = (await connection.channel.receive(Found, remaining)).found
                        if len(found) != len(keys):
                            raise ChannelError(f"answered {len(found)} of {len(keys)} keys")
                        return found
                    except ChannelError:
                        connection.close()
                        if not is_used:
                            raise

    async def fetch(
        self,
        address: Address,
        request_id: str,
        blocks: Sequence[HostBlock],
        targets: Sequence[np.ndarray],
        seconds: float,
    ) -> list[bool]:
        """Fills `targets` with blocks of a producer; which of them are filled, after at most `seconds`.

        Args:
            blocks: At most MAX_FETCHED_BLOCKS.

        Raises:
            ChannelError: It cannot be asked, or has failed. The contents of all targets are unspecified.
        """
        fetch = Fetch(request_id, [block.key for block in blocks], [block.is_state for block in blocks])
        async with _limited(seconds):
            while True:
                async with self._connection(address) as (connection, is_used):
                    try:
                        return await self._transport.receive_blocks(connection, fetch, blocks, targets)
                    except ChannelError:
                        connection.close()
                        if not is_used:
                            raise

    async def release(self, address: Address, request_id: str, seconds: float) -> None:
        """Tells a producer that no further block of a request is needed. Errors are ignored: its time limit remains."""
        with contextlib.suppress(ChannelError):
            async with _limited(seconds), self._connection(address) as (connection, _):
                try:
                    await connection.channel.send(Release(request_id))
                except ChannelError:
                    connection.close()
                    raise

    def close(self) -> None:
        """Ends all connections. Idempotent."""
        for peer in self._peers.values():
            _close_idle(peer, float("inf"))

    @contextlib.asynccontextmanager
    async def _connection(self, address: Address) -> AsyncIterator[tuple[Connection, bool]]:
        """A connection, and whether it was used before: then the producer may have closed it in the meantime.

        It is kept unless it was closed, or the context ends with an error.
        """
        peer = self._peer(address)
        peer.num_users += 1
        try:
            async with peer.limit:
                connection = _take_idle(peer)
                is_used = connection is not None
                if connection is None:
                    connection = await self._connect(address, peer)
                try:
                    yield connection, is_used
                except BaseException:
                    connection.close()
                    raise
                if connection.channel.sock.fileno() >= 0:
                    peer.idle.append((time.monotonic(), connection))
        finally:
            peer.num_users -= 1

    def _peer(self, address: Address) -> _Peer:
        """What is known of a producer, which becomes the most recently used one.

        Raises:
            ChannelError: Too many producers are being asked.
        """
        peer = self._peers.pop(address, None)
        if peer is None:
            peer = _Peer()
            if len(self._peers) >= _MAX_PEERS:
                self._forget_idle()
            if len(self._peers) >= _MAX_PEERS:
                oldest = next((each for each, other in self._peers.items() if not other.num_users), None)
                if oldest is None:
                    raise ChannelError(f"is not asked, because {_MAX_PEERS} others are being asked")
                _close_idle(self._peers.pop(oldest), float("inf"))
        self._peers[address] = peer
        if self._cleanup is None:
            self._cleanup = asyncio.get_running_loop().call_later(_MAX_IDLE_SECONDS, self._clean_up)
        return peer

    def _clean_up(self) -> None:
        self._forget_idle()
        loop = asyncio.get_running_loop()
        self._cleanup = loop.call_later(_MAX_IDLE_SECONDS, self._clean_up) if self._peers else None

    def _forget_idle(self) -> None:
        """Closes connections that were not used for long, and forgets producers of which nothing is left to know."""
        now = time.monotonic()
        for address, peer in list(self._peers.items()):
            _close_idle(peer, now - _MAX_IDLE_SECONDS)
            if not (peer.num_users or peer.idle or now < peer.avoid_until):
                del self._peers[address]

    async def _connect(self, address: Address, peer: _Peer) -> Connection:
        if time.monotonic() < peer.avoid_until:
            raise ChannelError(peer.reason)
        channel: Channel | None = None
        seconds = _UNREACHABLE_SECONDS
        try:
            channel = await self._transport.connect(address)
            await channel.send(self._hello)
            answer = await channel.receive_any()
            if isinstance(answer, Refused):
                seconds = _REFUSED_SECONDS
                raise ChannelError(f"has other blocks: {answer.reason}")
            if not isinstance(answer, Welcome):
                raise ChannelError(f"sent {type(answer).__name__} where Welcome was due")
            return await self._transport.open(channel, answer)
        except BaseException as e:
            if channel is not None:
                channel.close()
            if isinstance(e, ChannelError | asyncio.CancelledError):  # cancelled by a time limit
                peer.reason = str(e) or "does not answer"
                peer.avoid_until = time.monotonic() + seconds
            raise


def _close_idle(peer: _Peer, before: float) -> None:
    """Closes the connections that are unused since a time before `before`."""
    for since, connection in peer.idle:
        if since < before:
            connection.close()
    peer.idle = [(since, connection) for since, connection in peer.idle if since >= before]


def _take_idle(peer: _Peer) -> Connection | None:
    oldest = time.monotonic() - _MAX_IDLE_SECONDS
    while peer.idle:
        since, connection = peer.idle.pop()
        if since > oldest:
            return connection
        connection.close()
    return None


@contextlib.asynccontextmanager
async def _limited(seconds: float) -> AsyncIterator[None]:
    """A time limit, whose end is a ChannelError."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise ChannelError(f"has not answered within {seconds:g} s") from None

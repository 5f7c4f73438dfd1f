"""The producer's side: answers consumers out of the held blocks."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Mapping

from mvllm.extension_api import get_logger
from mvllm_kv_transfer.remote.channel import Channel, ChannelError
from mvllm_kv_transfer.remote.held_blocks import HeldBlocks
from mvllm_kv_transfer.remote.messages import (
    PROTOCOL_VERSION,
    Fetch,
    Found,
    Hello,
    Lookup,
    Refused,
    Release,
    Welcome,
)
from mvllm_kv_transfer.remote.transport import Transport

logger = get_logger("mvllm.kv_transfer.remote")

MAX_CONNECTIONS = 256
IDLE_SECONDS = 120.0
"""After which a connection without requests is closed."""
_MAX_LOOKUP_SECONDS = 30.0
_RETRY_SECONDS = 0.1
_MAX_NAMED_PARTS, _MAX_PART_LENGTH = 3, 100


class BlockServer:
    """Serves consumers until its task is cancelled.

    Args:
        transport: Has a listener.
        held: The blocks.
        hello: What this engine would say as a consumer.
        welcome: The answer to consumers whose blocks fit.

    Attributes:
        num_sent: Blocks that consumers got.
        changed: Set when held blocks have changed.
    """

    def __init__(self, transport: Transport, held: HeldBlocks, hello: Hello, welcome: Welcome) -> None:
        self._transport = transport
        self._held = held
        self._hello = hello
        self._welcome = welcome
        self._connections: set[asyncio.Task[None]] = set()
        self.num_sent = 0
        self.changed = asyncio.Event()

    async def run(self) -> None:
        """Accepts consumers, and releases held blocks whose time is over."""
        loop = asyncio.get_running_loop()
        expiry = loop.create_task(self._release_expired())
        listener = self._transport.listener
        assert listener is not None
        try:
            while True:
                try:
                    sock, _ = await loop.sock_accept(listener)
                except OSError as e:  # such as too many open files
                    logger.warning("A consumer of KV blocks could not connect: %s", e)
                    await asyncio.sleep(_RETRY_SECONDS)
                    continue
                if len(self._connections) >= MAX_CONNECTIONS:
                    sock.close()
                    continue
                task = loop.create_task(self._serve(sock))
                self._connections.add(task)
                task.add_done_callback(self._connections.discard)
        finally:
            expiry.cancel()
            for task in self._connections:
                task.cancel()

    async def _release_expired(self) -> None:
        while True:
            remaining = self._held.release_expired()
            if remaining is None:
                self.changed.clear()
                await self.changed.wait()
            else:
                await asyncio.sleep(min(remaining, 1.0))

    async def _serve(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        channel = Channel(sock, self._transport.seconds)
        try:
            await self._transport.accept(channel)
            reason = mismatch(self._hello, await channel.receive(Hello))
            if reason is not None:
                logger.warning("A consumer of KV blocks was refused: %s.", reason)
                await channel.send(Refused(reason))
                return
            await channel.send(self._welcome)
            await self._transport.after_welcome(channel)
            while True:
                await self._answer(channel)
        except ChannelError as e:
            logger.debug("A consumer of KV blocks %s.", e)
        finally:
            channel.close()

    async def _answer(self, channel: Channel) -> None:
        request = await channel.receive_any(IDLE_SECONDS)
        match request:
            case Lookup():
                await self._wait_for(request)
                await channel.send(Found(self._held.find(request.keys)))
            case Fetch():
                self.num_sent += await self._transport.send_blocks(channel, request, self._held)
            case Release():
                self._held.release(request.request_id)
            case _:
                raise ChannelError(f"sent {type(request).__name__} as a request")

    async def _wait_for(self, lookup: Lookup) -> None:
        """Waits until the keys that are expected are there."""
        deadline = time.monotonic() + min(max(lookup.seconds, 0.0), _MAX_LOOKUP_SECONDS)
        while self._held.waits_for(lookup.request_id, lookup.keys):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            self.changed.clear()
            if not self._held.waits_for(lookup.request_id, lookup.keys):
                return
            try:
                await asyncio.wait_for(self.changed.wait(), remaining)
            except TimeoutError:
                return


def mismatch(ours: Hello, theirs: Hello) -> str | None:
    """Why the consumer's blocks are not the producer's, as a clause; None if they are.

    Args:
        ours: Of the producer.
        theirs: Of the consumer.
    """
    if ours.version != theirs.version:
        return f"the producer speaks version {ours.version} of the protocol, the consumer version {theirs.version}"
    sizes = [(hello.block_bytes, hello.state_bytes) for hello in (ours, theirs)]
    if ours.namespace == theirs.namespace and sizes[0] == sizes[1]:
        return None
    names = [name for name in {**ours.parts, **theirs.parts} if ours.parts.get(name) != theirs.parts.get(name)]
    differing = [
        f"{_shortened(name)} is {_shortened(ours.parts.get(name))} on the producer and "
        f"{_shortened(theirs.parts.get(name))} on the consumer"
        for name in names[:_MAX_NAMED_PARTS]
    ]
    if sizes[0] != sizes[1] and not differing:
        differing = ["blocks and states have {} and {} bytes".format(*sizes[0])]
        differing[0] += " on the producer, {} and {} on the consumer".format(*sizes[1])
    return "; ".join(differing) or "the namespaces of producer and consumer differ"


def _shortened(value: str | None) -> str:
    if value is None:
        return "not set"
    return ascii(value)[1:-1] if len(value) <= _MAX_PART_LENGTH else f"{ascii(value[:_MAX_PART_LENGTH])[1:-1]}..."


def make_hello(namespace: bytes, block_bytes: int, state_bytes: int, parts: Mapping[str, str]) -> Hello:
    """An engine's Hello in this version of the protocol."""
    return Hello(PROTOCOL_VERSION, namespace, block_bytes, state_bytes, dict(parts))

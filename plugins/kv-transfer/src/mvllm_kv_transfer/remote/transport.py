"""What differs between the connectors: how engines find each other, and how the bytes of a block move."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from mvllm.extension_api.kv_transfer import HostBlock, KVConnectorContext
from mvllm_kv_transfer.remote.channel import Channel, ChannelError
from mvllm_kv_transfer.remote.held_blocks import HeldBlocks
from mvllm_kv_transfer.remote.messages import Fetch, Found, Welcome

Address = Hashable
"""Where an engine listens. `str` gives what messages say."""


def host_bytes(context: KVConnectorContext, block: HostBlock) -> np.ndarray:
    """The bytes of a host block: uint8 [bytes of the block]. A view."""
    cache = context.states if block.is_state else context.blocks
    assert cache is not None, "a state of a model without states"
    return cache.block(block.index)


class Connection:
    """A consumer's connection to a producer, ready for requests.

    Attributes:
        channel: The connection.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def close(self) -> None:
        """Ends it. Idempotent."""
        self.channel.close()


class Transport(ABC):
    """One way to move blocks. Its coroutines run in the connector's thread, and raise ChannelError.

    Attributes:
        listener: The producer's listening socket, non-blocking; None for a consumer.
        seconds: Time that one step of a transfer may take.
    """

    listener: socket.socket | None = None
    seconds: float

    @abstractmethod
    def location(self) -> Mapping[str, Any]:
        """The fields of `kv_transfer_params` that say where this engine listens."""

    @abstractmethod
    def address_of(self, params: Mapping[str, Any]) -> Address:
        """The address in the `kv_transfer_params` of a request, which are untrusted.

        Raises:
            ValueError: There is none, or it is not allowed. The message is a clause about the parameters.
        """

    @abstractmethod
    async def accept(self, channel: Channel) -> None:
        """Authenticates a consumer that has connected."""

    @abstractmethod
    async def connect(self, address: Address) -> Channel:
        """Connects to a producer, and authenticates it."""

    async def after_welcome(self, channel: Channel) -> None:
        """Sends what follows Welcome."""

    async def open(self, channel: Channel, welcome: Welcome) -> Connection:
        """Receives what follows Welcome."""
        return Connection(channel)

    async def send_blocks(self, channel: Channel, fetch: Fetch, held: HeldBlocks) -> int:
        """Answers Fetch. Returns the number of blocks that the consumer got."""
        found: list[HostBlock | None] = [held.begin_read(k, s) for k, s in zip(fetch.keys, fetch.are_states)]
        was_fetched = False
        try:
            await self.send_contents(channel, found)
            # The answer comes before the blocks are released: until then nobody changes them.
            were_held = [block is not None and held.is_held(block.key) for block in found]
            await channel.send(Found(were_held))
            was_fetched = True
        finally:
            for block in found:
                if block is not None:
                    held.end_read(block.key, fetch.request_id, was_fetched=was_fetched)
        return sum(were_held)

    @abstractmethod
    async def send_contents(self, channel: Channel, blocks: Sequence[HostBlock | None]) -> None:
        """Lets the consumer have the contents of blocks, which are held meanwhile; ends when it has them, or when they
        are under way.

        Args:
            blocks: By position in Fetch; None for those that are not there.
        """

    async def receive_blocks(
        self, connection: Connection, fetch: Fetch, blocks: Sequence[HostBlock], targets: Sequence[np.ndarray]
    ) -> list[bool]:
        """Sends Fetch, and fills `targets` (uint8 [bytes of the block]) with the blocks.

        Returns:
            By position, whether the target has the contents of its key. It has not if the producer has discarded the
            block meanwhile.
        """
        await connection.channel.send(fetch)
        are_there = await self.receive_contents(connection, blocks, targets)
        were_held = (await connection.channel.receive(Found)).found
        if len(were_held) != len(blocks):
            raise ChannelError(f"confirmed {len(were_held)} of {len(blocks)} blocks")
        return [is_there and was_held for is_there, was_held in zip(are_there, were_held)]

    @abstractmethod
    async def receive_contents(
        self, connection: Connection, blocks: Sequence[HostBlock], targets: Sequence[np.ndarray]
    ) -> list[bool]:
        """Fills `targets` with what `send_contents` offers. Returns, by position, whether the producer had it."""

    def close(self) -> None:
        """Ends listening. Idempotent."""
        if self.listener is not None:
            self.listener.close()

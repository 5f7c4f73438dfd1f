"""Transports in which the consumer itself copies blocks out of the producer's memory.

The producer says where the blocks are, and holds them until the consumer has copied. It may drop a block in the
meantime, if its time is over; so a consumer that has copied asks whether the blocks were held all the time.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from mvllm.kv_transfer.connector import HostBlock
from mvllm.kv_transfer.remote.channel import Channel, ChannelError
from mvllm.kv_transfer.remote.held_blocks import HeldBlocks
from mvllm.kv_transfer.remote.messages import Copied, Fetch, Found, Leased
from mvllm.kv_transfer.remote.transport import Connection, Transport


class LeasingTransport(Transport):
    """Base of these transports."""

    @abstractmethod
    async def copy_blocks(
        self, connection: Connection, blocks: Sequence[HostBlock], targets: Sequence[np.ndarray], indices: Sequence[int]
    ) -> None:
        """Fills `targets` with the producer's host blocks at `indices`.

        Args:
            blocks: The consumer's host blocks, which say whether each is a state.

        Raises:
            ChannelError: It has no such block, or copying has failed.
        """

    async def send_blocks(self, channel: Channel, fetch: Fetch, held: HeldBlocks) -> int:
        """See Transport."""
        found: list[HostBlock | None] = [held.begin_read(k, s) for k, s in zip(fetch.keys, fetch.are_states)]
        was_fetched = False
        try:
            await channel.send(Leased([-1 if block is None else block.index for block in found]))
            await channel.receive(Copied)
            # The answer comes before the blocks are released: until then nobody changes them.
            await channel.send(Found([block is not None and held.is_held(block.key) for block in found]))
            was_fetched = True
        finally:
            for block in found:
                if block is not None:
                    held.end_read(block.key, fetch.request_id, was_fetched=was_fetched)
        return sum(block is not None for block in found)

    async def receive_blocks(
        self, connection: Connection, fetch: Fetch, blocks: Sequence[HostBlock], targets: Sequence[np.ndarray]
    ) -> list[bool]:
        """See Transport."""
        channel = connection.channel
        await channel.send(fetch)
        indices = (await channel.receive(Leased)).indices
        if len(indices) != len(blocks):
            raise ChannelError(f"answered {len(indices)} of {len(blocks)} blocks")
        there = [position for position, index in enumerate(indices) if index >= 0]
        if there:
            await self.copy_blocks(
                connection,
                [blocks[position] for position in there],
                [targets[position] for position in there],
                [indices[position] for position in there],
            )
        await channel.send(Copied())
        found = (await channel.receive(Found)).found
        if len(found) != len(blocks):
            raise ChannelError(f"confirmed {len(found)} of {len(blocks)} blocks")
        return [is_held and index >= 0 for is_held, index in zip(found, indices)]

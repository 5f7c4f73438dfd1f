"""Transports in which the consumer itself copies blocks out of the producer's memory.

The producer says where the blocks are, and holds them until the consumer has copied.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from mvllm.extension_api.kv_transfer import HostBlock
from mvllm_kv_transfer.remote.channel import Channel, ChannelError
from mvllm_kv_transfer.remote.messages import Copied, Leased
from mvllm_kv_transfer.remote.transport import Connection, Transport


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

    async def send_contents(self, channel: Channel, blocks: Sequence[HostBlock | None]) -> None:
        """See Transport."""
        await channel.send(Leased([-1 if block is None else block.index for block in blocks]))
        await channel.receive(Copied)

    async def receive_contents(
        self, connection: Connection, blocks: Sequence[HostBlock], targets: Sequence[np.ndarray]
    ) -> list[bool]:
        """See Transport."""
        channel = connection.channel
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
        return [index >= 0 for index in indices]

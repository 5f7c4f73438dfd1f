"""Bytes between the ranks of a group, whatever the device: what ranks tell each other about their work.

A message is one tensor of a fixed size in the host's memory; what does not fit follows in a second one:

    length (8 bytes) | first 4096 bytes, padded        rest, if any
"""

from __future__ import annotations

import numpy as np
import torch

from mvllm.platform.communicator import Communicator

_FIRST_PART = 4096
"""Bytes that travel with the length, in the one tensor that most messages need."""

_LENGTH_BYTES = 8


class CpuGroup:
    """One rank's end. Every rank makes the same calls in the same order, but for send and receive.

    Args:
        communicator: Takes tensors in the host's memory; None for a group of one rank.
        rank: Position in the group.

    Attributes:
        communicator: As given.
        rank: Position in the group.
        world_size: Ranks in the group.
    """

    def __init__(self, communicator: Communicator | None, rank: int = 0) -> None:
        self.communicator = communicator
        self.rank = rank
        self.world_size = 1 if communicator is None else communicator.world_size

    def send(self, payload: bytes, *destinations: int) -> None:
        """Sends to other ranks of the group, without waiting for them to receive."""
        parts = _split(payload)
        for destination in destinations:
            for part in parts:
                self._require_communicator().send(part, destination)

    def receive(self, source: int) -> bytes:
        """What `send` of rank `source` was given; in the order in which it was sent."""
        first = self._receive(_LENGTH_BYTES + _FIRST_PART, source)
        length = int.from_bytes(first[:_LENGTH_BYTES], "little")
        payload = first[_LENGTH_BYTES : _LENGTH_BYTES + length]
        if length > _FIRST_PART:
            payload += self._receive(length - _FIRST_PART, source)
        return payload

    def close(self) -> None:
        """Leaves the group. Idempotent."""
        if self.communicator is not None:
            self.communicator.close()

    def _receive(self, count: int, source: int) -> bytes:
        # A communicator that takes tensors of the host may put what it receives on its device.
        return self._require_communicator().recv((count,), torch.uint8, source).cpu().numpy().tobytes()

    def _require_communicator(self) -> Communicator:
        assert self.communicator is not None, "a group of one rank: nobody to talk to"
        return self.communicator


def _split(payload: bytes) -> list[torch.Tensor]:
    first = torch.zeros(_LENGTH_BYTES + _FIRST_PART, dtype=torch.uint8)
    head = len(payload).to_bytes(_LENGTH_BYTES, "little") + payload[:_FIRST_PART]
    first[: len(head)] = _tensor(head)
    return [first] if len(payload) <= _FIRST_PART else [first, _tensor(payload[_FIRST_PART:])]


def _tensor(payload: bytes) -> torch.Tensor:
    """uint8 [len(payload)], in memory of its own."""
    return torch.from_numpy(np.frombuffer(payload, dtype=np.uint8).copy())

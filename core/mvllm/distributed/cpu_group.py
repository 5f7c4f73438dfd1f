"""CpuGroup: sends bytes between the ranks of a group through host memory, whatever the device.

A message is one tensor of a fixed size in host memory. A second tensor holds the bytes that do not fit:

    length (8 bytes) | first 4096 bytes, padded        rest, if any
"""

from __future__ import annotations

import numpy as np
import torch

from mvllm.platform.communicator import Communicator

_FIRST_PART = 4096
"""Bytes of the payload in the first tensor, which most messages need only."""

_LENGTH_BYTES = 8


class CpuGroup:
    """One rank's view of the group.

    Args:
        communicator: A communicator for tensors in host memory; None for a group of one rank.
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
        """Sends `payload` to other ranks of the group, without waiting for them to receive it."""
        parts = _split(payload)
        for destination in destinations:
            for part in parts:
                self._require_communicator().send(part, destination)

    def receive(self, source: int) -> bytes:
        """The next payload that rank `source` sent to this rank."""
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
        # A communicator that accepts host tensors may receive into tensors on its device.
        return self._require_communicator().recv((count,), torch.uint8, source).cpu().numpy().tobytes()

    def _require_communicator(self) -> Communicator:
        assert self.communicator is not None, "a group of one rank has no other rank to communicate with"
        return self.communicator


def _split(payload: bytes) -> list[torch.Tensor]:
    first = torch.zeros(_LENGTH_BYTES + _FIRST_PART, dtype=torch.uint8)
    head = len(payload).to_bytes(_LENGTH_BYTES, "little") + payload[:_FIRST_PART]
    first[: len(head)] = _tensor(head)
    return [first] if len(payload) <= _FIRST_PART else [first, _tensor(payload[_FIRST_PART:])]


def _tensor(payload: bytes) -> torch.Tensor:
    """A copy of `payload` as uint8 [len(payload)]."""
    return torch.from_numpy(np.frombuffer(payload, dtype=np.uint8).copy())

"""Collective operations within one group of ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Communicator(ABC):
    """Collectives over the ranks of one group.

    Phase: worker. Every rank of the group makes the same calls in the same order, with equal shapes and dtypes. Results
    are new tensors unless a method says that it works in place. A platform returns one from `Platform.communicator`;
    groups of one rank never ask for it.

    Attributes:
        rank: Position in the group.
        world_size: Ranks in the group.
        on_host: Whether tensors may be in the host's memory. Where they may not, core makes a second group for what the
            ranks tell each other in bytes.
    """

    rank: int
    world_size: int
    on_host: bool = False

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks; may work in place and return its argument."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The ranks' tensors, concatenated along `dim` in rank order."""

    @abstractmethod
    def reduce_scatter(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """This rank's equal share, along `dim`, of the sum over ranks."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """In place: every rank gets the values of rank `source`."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, destination: int) -> None:
        """Sends to rank `destination` of the group, without waiting for that rank to receive.

        The caller leaves `tensor` as it is from now on. What two ranks send each other arrives in order.
        """

    @abstractmethod
    def recv(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> torch.Tensor:
        """Receives what rank `source` of the group sends."""

    @abstractmethod
    def gather(self, tensor: torch.Tensor, destination: int = 0, dim: int = -1) -> torch.Tensor | None:
        """On rank `destination` the ranks' tensors concatenated along `dim`; None elsewhere."""

    @abstractmethod
    def all_to_all(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Rank i gets the i-th tensor of every rank, in rank order; all tensors have one shape and dtype."""

    @abstractmethod
    def barrier(self) -> None:
        """Returns when every rank has called it."""

    def close(self) -> None:
        """Leaves the group. Idempotent."""

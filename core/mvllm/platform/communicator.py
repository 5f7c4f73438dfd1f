"""The interface of communicators: collective operations within one group of ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mvllm.contract import Phase, phase
from mvllm.errors import PlatformError

if TYPE_CHECKING:
    import torch


@phase(Phase.WORKER)
class Communicator(ABC):
    """Collectives over the ranks of one group.

    Every rank of the group makes the same calls in the same order, with equal shapes and dtypes. Results
    are new tensors unless a method says that it works in place. `Platform.communicator` returns one;
    groups of one rank need none.

    Core calls `all_reduce`, `all_gather`, `send`, `recv` and `close`. The other collectives are optional since contract
    1.1 and are there for workers and models of other packages.

    Attributes:
        rank: Position in the group.
        world_size: Ranks in the group.
        on_host: Whether tensors may be in the host's memory. If not, core creates a second group for byte messages
            between ranks.
    """

    rank: int
    world_size: int
    on_host: bool = False

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks; may work in place and return its argument."""

    def all_reduce_add_rms_norm(
        self, tensor: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """`all_reduce` and the operation `fused_add_rms_norm` in one, for the end of a tensor-parallel block.

        Optional since contract 1.1; the default, None, means that core calls the two. If a class overrides it, dense
        decoder layers call it. All ranks must decide alike, by shapes and dtypes.

        Args:
            tensor: This rank's part of the sum: [T, hidden_size], compute dtype, contiguous.
            residual: [T, hidden_size], compute dtype, contiguous, the same on all ranks.
            weight: [hidden_size], compute dtype.
            eps: Added to the mean square.

        Returns:
            The normalised sum, and the sum itself rounded to the compute dtype; both [T, hidden_size]. They may reuse
            the storage of `tensor` and `residual`. None if this case is not supported.
        """
        return None

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The ranks' tensors, concatenated along `dim` in rank order."""

    def reduce_scatter(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """This rank's equal share, along `dim`, of the sum over ranks. Optional; the default uses `all_reduce`.

        Raises:
            ValueError: The size of `dim` is not a multiple of the number of ranks.
        """
        if tensor.shape[dim] % self.world_size:
            raise ValueError(f"{tensor.shape[dim]} elements cannot be shared evenly by {self.world_size} ranks.")
        return self.all_reduce(tensor.clone()).chunk(self.world_size, dim)[self.rank].contiguous()

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """In place: every rank gets the values of rank `source`. Optional; the default uses `all_gather`."""
        return tensor.copy_(self.all_gather(tensor.unsqueeze(0), 0)[source])

    @abstractmethod
    def send(self, tensor: torch.Tensor, destination: int) -> None:
        """Sends to rank `destination` of the group, without waiting for that rank to receive.

        The caller must not change `tensor` afterwards. Messages between two ranks arrive in order.
        """

    @abstractmethod
    def recv(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> torch.Tensor:
        """Receives a tensor from rank `source` of the group."""

    def gather(self, tensor: torch.Tensor, destination: int = 0, dim: int = -1) -> torch.Tensor | None:
        """On rank `destination` the ranks' tensors concatenated along `dim`; None elsewhere.

        Optional; the default uses `all_gather`.
        """
        gathered = self.all_gather(tensor, dim)
        return gathered if self.rank == destination else None

    def all_to_all(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Rank i gets the i-th tensor of every rank, in rank order; all tensors have one shape and dtype.

        Optional; the default uses `all_gather`.

        Raises:
            ValueError: There is not one tensor for each rank.
        """
        if len(tensors) != self.world_size:
            raise ValueError(f"all_to_all takes one tensor for each of {self.world_size} ranks, got {len(tensors)}.")
        gathered = self.all_gather(_stacked(tensors), 0)  # [source rank * destination rank, ...]
        return list(gathered[self.rank :: self.world_size].unbind(0))

    def barrier(self) -> None:
        """Returns when every rank has called it. Optional; the default gathers a tensor in the host's memory.

        Raises:
            PlatformError: The communicator does not take tensors in the host's memory and does not override this.
        """
        if not self.on_host:
            raise PlatformError(
                f"{type(self).__name__} has no barrier: the default needs on_host = True. Implement barrier()."
            )
        self.all_gather(_host_byte(), 0).tolist()

    def close(self) -> None:
        """Leaves the group. Idempotent."""


def _stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    import torch

    return torch.stack(list(tensors))


def _host_byte() -> torch.Tensor:
    import torch

    return torch.zeros(1, dtype=torch.uint8)

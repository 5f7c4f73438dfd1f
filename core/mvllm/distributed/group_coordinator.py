"""GroupCoordinator: the collectives of a group of ranks, which are the identity in a group of one rank."""

from __future__ import annotations

import torch

from mvllm.distributed.cpu_group import CpuGroup
from mvllm.platform.communicator import Communicator
from mvllm.platform.topology import GroupSpec


class GroupCoordinator:
    """One rank's view of its group. Collectives that are not methods here are methods of `device_group`.

    Args:
        spec: The group.
        communicator: The platform's communicator; None for a group of one rank.
        local_rank: The caller's rank among the workers on this machine.
        host_communicator: A communicator for tensors in host memory; required if `communicator` does not accept them.

    Attributes:
        name: The group's name, `tp` or `pp`.
        rank: The caller's rank in the engine's world.
        local_rank: The caller's rank among the workers on this machine.
        rank_in_group: The caller's position in the group.
        world_size: Ranks in the group.
        device_group: The platform's communicator, for tensors on the device; None for a group of one rank.
        cpu_group: Sends bytes between the ranks, whatever the device.
    """

    def __init__(
        self,
        spec: GroupSpec,
        communicator: Communicator | None = None,
        local_rank: int = 0,
        host_communicator: Communicator | None = None,
    ) -> None:
        self.spec = spec
        self.name = spec.name
        self.rank, self.local_rank = spec.rank, local_rank
        self.rank_in_group = spec.rank_in_group
        self.world_size = len(spec.ranks)
        if self.world_size > 1 and communicator is None:
            raise ValueError(f"Group {spec.name!r} has {self.world_size} ranks and no communicator.")
        self.device_group = communicator if self.world_size > 1 else None
        host = None
        if self.device_group is not None:
            host = host_communicator or (self.device_group if self.device_group.on_host else None)
            if host is None:
                raise ValueError(f"Group {spec.name!r} has no communicator for tensors in host memory.")
        self.cpu_group = CpuGroup(host, self.rank_in_group)

    @classmethod
    def single(cls, name: str) -> GroupCoordinator:
        """A group of this rank alone."""
        return cls(GroupSpec(name=name, ranks=(0,), rank=0))

    @property
    def is_first(self) -> bool:
        """Whether this rank is the group's first."""
        return self.rank_in_group == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank is the group's last."""
        return self.rank_in_group == self.world_size - 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks; may work in place."""
        return tensor if self.device_group is None else self.device_group.all_reduce(tensor)

    @property
    def fuses_add_rms_norm(self) -> bool:
        """Whether the platform's communicator has an `all_reduce_add_rms_norm` of its own."""
        default = Communicator.all_reduce_add_rms_norm
        found = getattr(type(self.device_group), "all_reduce_add_rms_norm", default)  # of one rank: None has none
        return found is not default

    def all_reduce_add_rms_norm(
        self, tensor: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """As in Communicator; None if the communicator does not support this case."""
        return self._require_communicator().all_reduce_add_rms_norm(tensor, residual, weight, eps)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The ranks' tensors, concatenated along `dim`."""
        return tensor if self.device_group is None else self.device_group.all_gather(tensor, dim)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Overwrites `tensor` with the values of rank `source`."""
        return tensor if self.device_group is None else self.device_group.broadcast(tensor, source)

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        """Sends `tensor` to another rank of the group, without waiting for it to receive."""
        self._require_communicator().send(tensor, destination)

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> torch.Tensor:
        """Receives a tensor from rank `source` of the group."""
        return self._require_communicator().recv(shape, dtype, source)

    def close(self) -> None:
        """Leaves the group. Idempotent."""
        if self.cpu_group.communicator is not self.device_group:
            self.cpu_group.close()
        if self.device_group is not None:
            self.device_group.close()

    def _require_communicator(self) -> Communicator:
        assert self.device_group is not None, f"group {self.name!r} has one rank and no other to communicate with"
        return self.device_group

"""Collectives between workers that own one device each.

If the processes of several workers form one XLA world (TPU chips of a slice), collectives are operations of the graph.
XLA's CPU device has a world of one process; there collectives go through the host's memory, over gloo.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mvllm.plugin_api import Communicator, GroupSpec, PlatformError, TorchCommunicator


def make_communicator(group: GroupSpec, device: torch.device) -> Communicator:
    """The communicator of this group: over XLA if its world is that of the engine, else over the host."""
    import torch_xla.runtime as xr

    host = HostCommunicator(group, device)
    if xr.device_type() != "CPU" and xr.world_size() == (group.world_size or len(group.ranks)):
        return XlaCommunicator(group, device, host)
    return host


def replica_groups(ranks: Sequence[int], world_size: int) -> list[list[int]]:
    """All groups of the engine's world with this group's structure, which XLA's programs list on every rank.

    The ranks of a group have equal distances: adjacent ranks for tensor parallelism, every n-th rank for pipeline
    parallelism:

        ranks 2 3 of 4 -> [0 1] [2 3]       ranks 1 3 of 4 -> [0 2] [1 3]

    Raises:
        PlatformError: The ranks are not at equal distances.
    """
    size, stride = len(ranks), ranks[1] - ranks[0]
    if stride < 1 or list(ranks) != list(range(ranks[0], ranks[0] + size * stride, stride)) or world_size % size:
        raise PlatformError(f"XLA's collectives need ranks at equal distances, not {list(ranks)} of {world_size}.")
    span = size * stride
    return [
        list(range(begin, begin + span, stride))
        for block in range(0, world_size, span)
        for begin in range(block, block + stride)
    ]


class HostCommunicator(Communicator):
    """Collectives over gloo, between copies in the host's memory.

    Args:
        group: The group.
        device: Device of the results.
    """

    on_host = True

    def __init__(self, group: GroupSpec, device: torch.device) -> None:
        self._inner = TorchCommunicator(group, "gloo")
        self._device = device
        self.rank, self.world_size = self._inner.rank, self._inner.world_size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._back(self._inner.all_reduce(_host(tensor)), tensor)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return self._back(self._inner.all_gather(_host(tensor), dim), tensor)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        if tensor.device.type == "cpu":
            return self._inner.broadcast(tensor, source)
        return tensor.copy_(self._back(self._inner.broadcast(_host(tensor), source), tensor))

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        self._inner.send(_host(tensor), destination)

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> torch.Tensor:
        return self._inner.recv(shape, dtype, source).to(self._device)

    def close(self) -> None:
        self._inner.close()

    def _back(self, host: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return host.to(like.device)


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """A private copy in the host's memory."""
    if tensor.device.type == "cpu":
        return tensor.contiguous().clone()
    if tensor.device.type == "xla":
        import torch_xla

        torch_xla.sync()  # runs the whole graph; reading the tensor alone would run its part twice
    return tensor.cpu().contiguous()


class XlaCommunicator(Communicator):
    """Collectives as operations of the graph. Sends and receives go through the host.

    Args:
        group: The group.
        device: The device.
        host: The same group over the host.
    """

    on_host = False

    def __init__(self, group: GroupSpec, device: torch.device, host: Communicator) -> None:
        self._host_group, self._device = host, device
        self.rank, self.world_size = group.rank_in_group, len(group.ranks)
        self._groups = replica_groups(group.ranks, group.world_size or len(group.ranks))

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = xm().all_reduce(xm().REDUCE_SUM, tensor, groups=self._groups)
        return found

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        found: torch.Tensor = xm().all_gather(tensor, dim % tensor.dim(), groups=self._groups, pin_layout=False)
        return found

    def reduce_scatter(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        found: torch.Tensor = xm().reduce_scatter(
            xm().REDUCE_SUM, tensor, 1.0, dim % tensor.dim(), self.world_size, groups=self._groups, pin_layout=False
        )
        return found

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        # A sum in which other ranks add zeros. The source is data, because all ranks must record the same program.
        adds = torch.tensor([self.rank == source], device=self._device)
        return tensor.copy_(self.all_reduce(torch.where(adds, tensor, torch.zeros_like(tensor))))

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        self._host_group.send(tensor, destination)

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> torch.Tensor:
        return self._host_group.recv(shape, dtype, source)

    def all_to_all(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        size = self.world_size
        found = xm().all_to_all(torch.stack(list(tensors)), 0, 0, size, groups=self._groups, pin_layout=False)
        return list(found.unbind(0))

    def barrier(self) -> None:
        self._host_group.barrier()

    def close(self) -> None:
        self._host_group.close()


def xm() -> Any:
    """torch_xla's collectives."""
    import torch_xla.core.xla_model

    return torch_xla.core.xla_model

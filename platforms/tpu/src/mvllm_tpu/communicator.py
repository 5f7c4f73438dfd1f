"""Collectives between workers that own one device each.

Where the processes of several workers make up one XLA world (TPU chips of a slice), collectives are operations of the
graph. XLA's CPU device knows its own process alone: there ranks exchange through the host's memory, over gloo.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mvllm.plugin_api import Communicator, GroupSpec, TorchCommunicator


def make_communicator(group: GroupSpec, device: torch.device) -> Communicator:
    """The communicator of this group."""
    return HostCommunicator(group, device)


class HostCommunicator(Communicator):
    """Collectives over gloo, between copies in the host's memory.

    Args:
        group: The group.
        device: Where results go.
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

    def reduce_scatter(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return self._back(self._inner.reduce_scatter(_host(tensor), dim), tensor)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        if tensor.device.type == "cpu":
            return self._inner.broadcast(tensor, source)
        return tensor.copy_(self._back(self._inner.broadcast(_host(tensor), source), tensor))

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        self._inner.send(_host(tensor), destination)

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> torch.Tensor:
        return self._inner.recv(shape, dtype, source).to(self._device)

    def gather(self, tensor: torch.Tensor, destination: int = 0, dim: int = -1) -> torch.Tensor | None:
        found = self._inner.gather(_host(tensor), destination, dim)
        return None if found is None else self._back(found, tensor)

    def all_to_all(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found = self._inner.all_to_all([_host(tensor) for tensor in tensors])
        return [self._back(each, tensors[0]) for each in found]

    def barrier(self) -> None:
        self._inner.barrier()

    def close(self) -> None:
        self._inner.close()

    def _back(self, host: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return host.to(like.device)


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the host's memory that nobody else changes."""
    return tensor.contiguous().clone() if tensor.device.type == "cpu" else tensor.cpu().contiguous()

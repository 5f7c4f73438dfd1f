"""Collectives between example devices through the host, because torch's gloo does not support them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import mvllm.plugin_api as api
from mvllm_example_device.strict import Strict, in_worker


class ExampleCommunicator(Strict, api.Communicator):
    """Copies to the host, lets the host's communicator do it, copies back.

    Args:
        spec: The group.
        device: This rank's device.
    """

    def __init__(self, spec: api.GroupSpec, device: torch.device) -> None:
        in_worker()
        self._device = device
        self._host = api.TorchCommunicator(spec, backend="gloo", device=torch.device("cpu"))
        self.rank, self.world_size = self._host.rank, self._host.world_size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._host.all_reduce(self._out(tensor)).to(self._device)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return self._host.all_gather(self._out(tensor), dim).to(self._device)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return self._host.reduce_scatter(self._out(tensor), dim).to(self._device)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        return tensor.copy_(self._host.broadcast(self._out(tensor).contiguous(), source))

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        self._host.send(self._out(tensor), destination)

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> torch.Tensor:
        in_worker()
        return self._host.recv(shape, dtype, source).to(self._device)

    def gather(self, tensor: torch.Tensor, destination: int = 0, dim: int = -1) -> torch.Tensor | None:
        gathered = self._host.gather(self._out(tensor), destination, dim)
        return None if gathered is None else gathered.to(self._device)

    def all_to_all(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        received = self._host.all_to_all([self._out(tensor) for tensor in tensors])
        return [tensor.to(self._device) for tensor in received]

    def barrier(self) -> None:
        in_worker()
        self._host.barrier()

    def close(self) -> None:
        in_worker()
        self._host.close()

    def _out(self, tensor: torch.Tensor) -> torch.Tensor:
        in_worker()
        if tensor.device != self._device:
            raise api.ContractError(f"A collective of {self._device} was given a tensor of {tensor.device}.")
        return tensor.cpu()

"""Collectives between example devices through the host, because torch's gloo does not support them."""

from __future__ import annotations

import torch

import mvllm.plugin_api as api
from mvllm_example_device.strict import Strict, in_worker


class ExampleCommunicator(Strict, api.Communicator):
    """Copies tensors to the host, calls the host's communicator, and copies the results back.

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

    def all_reduce_add_rms_norm(
        self, tensor: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A device with a kernel for it avoids a round trip; here it shows how the parts fit together."""
        total = residual + self.all_reduce(tensor)
        wide = total.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * normed.to(total.dtype), total

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return self._host.all_gather(self._out(tensor), dim).to(self._device)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        return tensor.copy_(self._host.broadcast(self._out(tensor).contiguous(), source))

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        self._host.send(self._out(tensor), destination)

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> torch.Tensor:
        in_worker()
        return self._host.recv(shape, dtype, source).to(self._device)

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

"""TorchCommunicator: collectives over torch.distributed, for platforms whose vendor provides a backend for it."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from datetime import timedelta
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from mvllm.logging import get_logger
from mvllm.platform.communicator import Communicator
from mvllm.platform.topology import GroupSpec

logger = get_logger(__name__)

HOST_BACKEND = "gloo"
"""Torch's backend for tensors in host memory."""

_MAX_PENDING_SENDS = 16
"""Sends to one rank that may be unreceived at once. More than any pipeline has steps in flight."""

_CLOSING_SECONDS = 2.0
"""How long `close` waits for other ranks to receive the last sends."""

_groups: WeakValueDictionary[tuple[tuple[int, ...], str], dist.ProcessGroup] = WeakValueDictionary()
"""Groups within a world, by ranks and backend. The references are weak: torch keeps the groups as long as the world,
and a group that outlived it would fail when the process ends."""


def _group_within_world(ranks: tuple[int, ...], backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """The group of `ranks`, created once.

    It lasts as long as the world, because torch cannot create the same group twice: the second one would use the
    rendezvous keys of the first.
    """
    group = _groups.get((ranks, backend))
    if group is None:
        group = dist.new_group(list(ranks), backend=backend, timeout=timeout, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup), "the caller is one of the ranks"
        _groups[ranks, backend] = group
    return group


class TorchCommunicator(Communicator):
    """A group of torch.distributed.

    The first communicator of a process initializes torch's world: all ranks of the engine, or, if the spec has no world
    size, the ranks of its own group. Later ones are groups within that world, which only their members create, in the
    same order. A world that was initialized before is used and never destroyed.

    Args:
        spec: The group, with a rendezvous address.
        backend: The name of torch's backend for the device.
        device: The device of received tensors; None for torch's default.
        timeout: Seconds after which a collective that some rank has not joined fails.
    """

    def __init__(
        self, spec: GroupSpec, backend: str, device: torch.device | None = None, timeout: float = 600.0
    ) -> None:
        self.rank = spec.rank_in_group
        self.world_size = len(spec.ranks)
        self.on_host = backend == HOST_BACKEND
        self._device = device
        self._owns_world = not dist.is_initialized()
        self._pending_sends: dict[int, deque[tuple[dist.Work, torch.Tensor]]] = defaultdict(deque)
        limit = timedelta(seconds=timeout)
        if self._owns_world:
            if spec.init_method is None:
                raise ValueError(f"Group {spec.name!r} is the first of its process and has no rendezvous address.")
            dist.init_process_group(
                backend,
                init_method=spec.init_method,
                rank=spec.rank if spec.world_size else self.rank,
                world_size=spec.world_size or self.world_size,
                timeout=limit,
            )
        self._group: dist.ProcessGroup | None
        if self._owns_world and self.world_size == dist.get_world_size():
            self._group = dist.group.WORLD
        else:
            self._group = _group_within_world(spec.ranks, backend, limit)
        self._closed = False

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous()
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.world_size)]
        dist.all_gather(parts, tensor.contiguous(), group=self._group)
        return torch.cat(parts, dim=dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        parts = [part.contiguous() for part in tensor.chunk(self.world_size, dim=dim)]
        if tensor.shape[dim] % self.world_size:
            raise ValueError(f"{tensor.shape[dim]} elements cannot be divided evenly among {self.world_size} ranks.")
        result = torch.empty_like(parts[0])
        dist.reduce_scatter(result, parts, group=self._group)
        return result

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        dist.broadcast(tensor, src=self._global(source), group=self._group)
        return tensor

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        tensor = tensor.contiguous()
        work = dist.isend(tensor, dst=self._global(destination), group=self._group)
        assert work is not None
        pending = self._pending_sends[destination]
        pending.append((work, tensor))  # the tensor must live until it has been sent
        if len(pending) > _MAX_PENDING_SENDS:
            pending.popleft()[0].wait()

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        dist.recv(tensor, src=self._global(source), group=self._group)
        return tensor

    def gather(self, tensor: torch.Tensor, destination: int = 0, dim: int = -1) -> torch.Tensor | None:
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)] if self.rank == destination else None
        dist.gather(tensor, parts, dst=self._global(destination), group=self._group)
        return None if parts is None else torch.cat(parts, dim=dim)

    def all_to_all(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if len(tensors) != self.world_size:
            raise ValueError(f"all_to_all takes one tensor for each of {self.world_size} ranks, got {len(tensors)}.")
        # Every rank passes the same list of shapes, so received tensors have the shape of the one that this rank keeps.
        own = tensors[self.rank]
        outgoing = torch.cat([tensor.reshape(-1) for tensor in tensors])
        incoming = outgoing.new_empty(own.numel() * self.world_size)
        dist.all_to_all_single(
            incoming,
            outgoing,
            output_split_sizes=[own.numel()] * self.world_size,
            input_split_sizes=[math.prod(tensor.shape) for tensor in tensors],
            group=self._group,
        )
        return [part.view(own.shape) for part in incoming.chunk(self.world_size)]

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._wait_for_sends()
        self._group = None
        if self._owns_world and dist.is_initialized():
            dist.destroy_process_group()

    def _wait_for_sends(self) -> None:
        """Waits until pending sends are received, within a deadline; a send that fails is skipped."""
        deadline = time.monotonic() + _CLOSING_SECONDS
        for pending in self._pending_sends.values():
            for work, _ in pending:
                try:
                    work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
                except RuntimeError as e:
                    logger.debug("A message to another rank was not received: %s", e)
                    break
        self._pending_sends.clear()

    def _global(self, rank: int) -> int:
        assert self._group is not None
        return dist.get_global_rank(self._group, rank)

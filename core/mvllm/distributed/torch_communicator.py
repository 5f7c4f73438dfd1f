"""Collectives over torch.distributed, for every platform whose vendor provides a backend for it."""

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
"""Torch's backend for tensors in the host's memory."""

_MAX_PENDING_SENDS = 16
"""Sends to one rank that it may not have received yet. More than any pipeline has steps under way."""

_CLOSING_SECONDS = 2.0
"""How long a rank that leaves waits for others to receive its last messages."""

_groups: WeakValueDictionary[tuple[tuple[int, ...], str], dist.ProcessGroup] = WeakValueDictionary()
"""Groups within a world, by ranks and backend. Torch keeps them as long as the world; nobody else may, or they would
outlive it and fail when the process ends."""


def _group_within_world(ranks: tuple[int, ...], backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """A group of some ranks.

    It lasts as long as the world, since torch cannot make the same group a second time: the second would look for its
    members where those of the first were.
    """
    group = _groups.get((ranks, backend))
    if group is None:
        group = dist.new_group(list(ranks), backend=backend, timeout=timeout, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup), "the caller is one of the ranks"
        _groups[ranks, backend] = group
    return group


class TorchCommunicator(Communicator):
    """A group of torch.distributed.

    The first communicator of a process joins torch's world: all ranks of the engine, or, where the spec does not say
    how many there are, the ranks of its own group. Later ones are groups within that world; only their members need to
    make them, in the same order. A world that was there before is used, and left as it is.

    Args:
        spec: The group, with a rendezvous address.
        backend: Name of torch's backend, as the platform's vendor calls it.
        device: Where received tensors are made; None for torch's default.
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
            raise ValueError(f"{tensor.shape[dim]} elements cannot be shared evenly by {self.world_size} ranks.")
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
        unsettled = self._pending_sends[destination]
        unsettled.append((work, tensor))  # which must live until it has been sent
        if len(unsettled) > _MAX_PENDING_SENDS:
            unsettled.popleft()[0].wait()

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
        # Every rank passes the same list of shapes, so what arrives here has the shape of what this rank keeps.
        mine = tensors[self.rank]
        outgoing = torch.cat([tensor.reshape(-1) for tensor in tensors])
        incoming = outgoing.new_empty(mine.numel() * self.world_size)
        dist.all_to_all_single(
            incoming,
            outgoing,
            output_split_sizes=[mine.numel()] * self.world_size,
            input_split_sizes=[math.prod(tensor.shape) for tensor in tensors],
            group=self._group,
        )
        return [part.view(mine.shape) for part in incoming.chunk(self.world_size)]

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
        """Lets others receive what they were sent; whoever is gone, or does not want it any more, is not waited for."""
        deadline = time.monotonic() + _CLOSING_SECONDS
        for unsettled in self._pending_sends.values():
            for work, _ in unsettled:
                try:
                    work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
                except RuntimeError as e:
                    logger.debug("A message to another rank was not received: %s", e)
                    break
        self._pending_sends.clear()

    def _global(self, rank: int) -> int:
        assert self._group is not None
        return dist.get_global_rank(self._group, rank)

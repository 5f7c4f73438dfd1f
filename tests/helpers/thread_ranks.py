"""Several ranks in one process: each runs in a thread, and collectives meet at a barrier."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, Queue
from typing import TypeVar

import torch

from mvllm.distributed.group_coordinator import GroupCoordinator
from mvllm.platform.communicator import Communicator
from mvllm.platform.topology import GroupSpec

T = TypeVar("T")


class _ThreadRendezvous:
    """Exchanges values between the ranks of a group."""

    def __init__(self, world_size: int) -> None:
        self._barrier = threading.Barrier(world_size, timeout=60)
        self._slots: list[object] = [None] * world_size
        self.mail: defaultdict[tuple[int, int], Queue[torch.Tensor]] = defaultdict(Queue)

    def exchange(self, rank: int, thing: object) -> list:
        self._slots[rank] = thing
        self._barrier.wait()
        everything = list(self._slots)
        self._barrier.wait()
        return everything

    def abort(self) -> None:
        self._barrier.abort()


class ThreadCommunicator(Communicator):
    """Communicator of one rank."""

    on_host = True

    def __init__(self, rendezvous: _ThreadRendezvous, rank: int, world_size: int) -> None:
        self._rendezvous, self.rank, self.world_size = rendezvous, rank, world_size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._rendezvous.exchange(self.rank, tensor.clone())).sum(dim=0)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self._rendezvous.exchange(self.rank, tensor.clone()), dim=dim)

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        self._rendezvous.mail[self.rank, destination].put(tensor.clone())

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> torch.Tensor:
        try:
            tensor = self._rendezvous.mail[source, self.rank].get(timeout=120)
        except Empty as e:
            raise RuntimeError(f"Rank {source} sent rank {self.rank} nothing in 60 s.") from e
        assert (tuple(tensor.shape), tensor.dtype) == (tuple(shape), dtype)
        return tensor


def fake_group(name: str, rank: int, world_size: int) -> GroupCoordinator:
    """Communicator of a group whose collectives are not called."""
    rendezvous = _ThreadRendezvous(world_size)
    spec = GroupSpec(name, tuple(range(world_size)), rank)
    return GroupCoordinator(spec, ThreadCommunicator(rendezvous, rank, world_size))


def run_ranks(world_size: int, body: Callable[[GroupCoordinator], T], name: str = "tp") -> list[T]:
    """Runs `body` once per rank, in threads, and returns the results in rank order."""
    rendezvous = _ThreadRendezvous(world_size)

    def run(rank: int) -> T:
        spec = GroupSpec(name, tuple(range(world_size)), rank)
        try:
            return body(GroupCoordinator(spec, ThreadCommunicator(rendezvous, rank, world_size)))
        except BaseException:
            rendezvous.abort()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        return [future.result() for future in [pool.submit(run, rank) for rank in range(world_size)]]


def make_groups(name: str, world_size: int) -> list[GroupCoordinator]:
    """Communicators of all ranks of one group, for use from one thread: they support send and receive."""
    rendezvous, ranks = _ThreadRendezvous(world_size), tuple(range(world_size))
    return [
        GroupCoordinator(GroupSpec(name, ranks, rank), ThreadCommunicator(rendezvous, rank, world_size))
        for rank in ranks
    ]

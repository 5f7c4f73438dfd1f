"""Launch topology of workers, and the context that each worker gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from mvllm.contract import Phase, phase
from mvllm.errors import PlatformError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


@phase(Phase.FRONTEND, Phase.ENGINE)
@dataclass(frozen=True)
class LaunchTopology:
    """Number of workers, devices per worker, permitted executors and environment of each worker.

    Pure.

    A worker process is always a new program: it inherits neither driver state nor locks from its parent, and it may
    have child processes.

    Attributes:
        num_workers: Worker processes. World size need not equal this: one worker may drive several devices.
        devices_per_worker: Devices per worker. Core's worker drives the devices of adjacent ranks of one
            tensor-parallel group and shards its tensors over them with `DeviceRuntime.place`, so a worker never holds
            more than one pipeline stage.
        executors: Permitted executors, the preferred one first: `uni`, `mp`, `external_launcher`, and names of
            executors of other packages, installed or not, such as `ray`.
        env_per_worker: Variables to set for each worker before it imports anything, one mapping per worker. For a
            worker in the process of its engine core, only variables that are not set yet are set, only while the engine
            starts, and only if torch has not been imported before.
        ray_resource: Deprecated since contract 1.1, until 2.0: an executor of another package finds what it needs to
            know of a device by an entry point of its own, as that package says.
        device_variable: The variable that limits a process to some devices. The executor `ray` sets it on its workers
            to the devices of the engine's workers on the same machine, in order of local rank, and overrides
            `env_per_worker`.
    """

    num_workers: int
    devices_per_worker: int
    executors: tuple[str, ...]
    env_per_worker: tuple[Mapping[str, str], ...] = ()
    ray_resource: str | None = None
    device_variable: str | None = None

    def __post_init__(self) -> None:
        if self.num_workers < 1 or self.devices_per_worker < 1 or not self.executors:
            raise ValueError(
                f"LaunchTopology must have at least one worker, one device per worker and one executor, found {self}."
            )
        if len(self.env_per_worker) not in (0, self.num_workers):
            raise ValueError(
                f"env_per_worker has variables for {len(self.env_per_worker)} workers, the topology has "
                f"{self.num_workers}. Give one mapping per worker, or none."
            )


@phase(Phase.WORKER)
@dataclass(frozen=True)
class WorkerContext:
    """Ranks, seed and rendezvous address of one worker.

    Made by the executor, an argument of the worker class and of `Platform.init_device`.

    Attributes:
        rank: Rank in the engine's world.
        local_rank: Rank among the workers on this machine, including those of other replicas of the engine; a platform
            binds the device of this number.
        world_size: Ranks of the engine.
        local_world_size: Ranks on this machine.
        seed: Seed for the device's generators.
        in_engine_process: The worker shares its process with the front end or the engine core.
        init_method: Rendezvous URL, as in GroupSpec; None for a single rank.
        every_rank_answers: Each rank has its own engine core, which needs the complete result of every step. Otherwise
            one core drives all ranks, and only the last pipeline stage returns results.
        options: Platform-specific options by name.
        num_devices: Devices that the worker drives (`LaunchTopology.devices_per_worker`). The worker of `local_rank` r
            drives those numbered from r * num_devices on, among the devices that its environment variables show.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    seed: int = 0
    in_engine_process: bool = True
    init_method: str | None = None
    every_rank_answers: bool = False
    options: Mapping[str, str] = field(default_factory=dict)
    num_devices: int = 1


@phase(Phase.WORKER)
@dataclass(frozen=True)
class GroupSpec:
    """A set of ranks that communicate. The argument of `Platform.communicator`.

    Attributes:
        name: For instance `tp` or `pp`.
        ranks: Global ranks, in group order.
        rank: The caller's global rank, one of `ranks`.
        init_method: Rendezvous URL of torch.distributed, the same on all ranks of the engine. On one machine it is
            `file:///proc/self/fd/N`, a file without a name that every worker process has inherited; where there is no
            /proc, over several machines and with the external launcher it is `tcp://HOST:PORT`. It belongs to torch,
            which core uses beside the platform's communicator: a library that meets by itself neither listens on the
            port nor writes to the file, but tells its own address to the other ranks with `exchange`.
        world_size: Ranks of the whole engine, all of which connect at `init_method`; None if only this group does.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    init_method: str | None = None
    world_size: int | None = None

    @property
    def rank_in_group(self) -> int:
        """The caller's position in `ranks`."""
        return self.ranks.index(self.rank)

    def exchange(self, value: bytes, timeout: float = 300.0) -> list[bytes]:
        """Gives every rank of the group the values of all its ranks, in group order.

        For libraries that meet by themselves, with torch tensors or without: one rank's value is the address or the
        unique id at which the others join. Every rank calls it, each time that any of them does. Since contract 1.1.

        Args:
            value: This rank's value; may be empty.
            timeout: Seconds to wait for the other ranks.

        Raises:
            PlatformError: The group has no rendezvous URL, or a rank did not call it in time.
        """
        if len(self.ranks) == 1:
            return [value]
        if self.init_method is None:
            raise PlatformError(f"Group {self.name!r} has several ranks and no rendezvous URL.")
        from torch.distributed.distributed_c10d import PrefixStore

        shared = _store(self.init_method, *((self.rank, self.world_size) if self.world_size else self._within_group()))
        place = f"mvllm/{self.name}/{'-'.join(map(str, self.ranks))}"
        turn = _turns[self.init_method, place, self.rank] = _turns.get((self.init_method, place, self.rank), 0) + 1
        store = PrefixStore(f"{place}/{turn}", shared)
        store.set(str(self.rank), value)  # type: ignore[arg-type]  # takes bytes as well
        found: list[bytes] = []
        for rank in self.ranks:
            try:
                store.wait([str(rank)], timedelta(seconds=timeout))
            except RuntimeError as e:  # torch's DistStoreError
                raise PlatformError(
                    f"Rank {rank} of the group {self.name!r} did not call `GroupSpec.exchange` within {timeout:g} s."
                ) from e
            found.append(store.get(str(rank)))
        return found

    def _within_group(self) -> tuple[int, int]:
        return self.rank_in_group, len(self.ranks)


_stores: dict[tuple[str, int], Store] = {}
"""By rendezvous URL and rank. They live as long as the process: the first rank's serves the others."""

_turns: dict[tuple[str, str, int], int] = {}
"""How often `exchange` was called, by rendezvous URL, group and rank."""


def _store(init_method: str, rank: int, world_size: int) -> Store:
    from torch.distributed.rendezvous import rendezvous

    if (init_method, rank) not in _stores:
        _stores[init_method, rank], _, _ = next(rendezvous(init_method, rank, world_size))
    return _stores[init_method, rank]

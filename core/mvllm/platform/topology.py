"""Where workers run and what each of them is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LaunchTopology:
    """How a platform wants the workers of one engine to be launched.

    Phase: frontend or engine; pure.

    How a worker process starts is not the platform's to say: it is always a fresh program, which inherits neither a
    driver's state nor a lock from its parent, and may have children of its own.

    Attributes:
        num_workers: Worker processes. World size need not equal this: one worker may drive several devices.
        devices_per_worker: Devices each of them drives. Core's worker has those of neighbouring ranks of one
            tensor-parallel group, and spreads its tensors over them with `DeviceRuntime.place`; so a worker never holds
            more than one pipeline stage.
        executors: Executors that may be used, the preferred one first: `uni`, `mp`, `external_launcher`, and names of
            executors that packages bring, installed or not, such as `ray`.
        env_per_worker: Variables to set for each worker before it imports anything, one mapping per worker. A worker in
            the process of its engine core has those that nobody set, and only while the engine starts; none where torch
            was imported before.
        ray_resource: Ray's name of the resource that one device is, which the executor `ray` claims for each worker;
            None where the platform cannot be used with it.
        device_variable: The variable that limits a process to some devices. Ray gives devices out by id: on its workers
            this one lists those of the engine's workers on the same machine, in order of local rank, whatever
            `env_per_worker` says.
    """

    num_workers: int
    devices_per_worker: int
    executors: tuple[str, ...]
    env_per_worker: tuple[Mapping[str, str], ...] = ()
    ray_resource: str | None = None
    device_variable: str | None = None

    def __post_init__(self) -> None:
        if self.num_workers < 1 or self.devices_per_worker < 1 or not self.executors:
            raise ValueError(f"A topology has workers, devices for them and an executor that may be used: {self}")
        if len(self.env_per_worker) not in (0, self.num_workers):
            raise ValueError(
                f"env_per_worker has variables for {len(self.env_per_worker)} workers, the topology has "
                f"{self.num_workers}; give one mapping for each worker, or none at all."
            )


@dataclass(frozen=True)
class WorkerContext:
    """Who a worker is. Phase: worker; made by the executor, handed to the worker class and to `Platform.init_device`.

    Attributes:
        rank: Rank in the engine's world.
        local_rank: Rank among the workers on this machine, those of other replicas of the engine included; a platform
            binds the device from it.
        world_size: Ranks of the engine.
        local_world_size: Ranks on this machine.
        seed: Seed for the device's generators.
        in_engine_process: The worker shares its process with the front end or the engine core.
        init_method: Where the ranks meet, for instance `tcp://127.0.0.1:1234`; None for a rank on its own.
        every_rank_answers: Each rank belongs to an engine core of its own, which wants the whole result of every step.
            Otherwise one core drives all ranks, and only the last pipeline stage answers.
        options: Platform-specific options by name.
        num_devices: Devices that the worker drives, where `LaunchTopology.devices_per_worker` gives it several. The
            worker of `local_rank` r has those numbered from r * num_devices on, among the ones that its variables show.
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


@dataclass(frozen=True)
class GroupSpec:
    """A set of ranks that communicate. Phase: worker, the argument of `Platform.communicator`.

    Attributes:
        name: For instance `tp` or `pp`.
        ranks: Global ranks, in group order.
        rank: The caller's global rank, one of `ranks`.
        init_method: Rendezvous address, for instance `tcp://127.0.0.1:1234`.
        world_size: Ranks of the whole engine, all of which meet at `init_method`; None when the group meets alone.
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

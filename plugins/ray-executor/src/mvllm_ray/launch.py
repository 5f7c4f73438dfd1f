"""From a topology to actors that know their ranks. Calls are RpcExecutor's; this places and starts the actors.

1. claim     a bundle for each worker, in the placement group that we are in or in one of our own
2. identify  each actor says where it is and which devices Ray gave it
3. order     our own node first, then node by node: neighbours in rank are neighbours in the cluster
4. initialize  name, rank, environment; queue ends by shared memory on our node, by TCP on others
5. build, run  as in any worker process
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from mvllm.extension_api import (
    ActivityTable,
    ConfigError,
    EngineConfig,
    FileDescriptorServer,
    LaunchTopology,
    MessageReader,
    MessageWithFds,
    MessageWriter,
    Platform,
    PlatformError,
    Reply,
    RpcQueues,
    WorkerContext,
    anonymous_file,
    devices_per_worker,
    encode_worker_configs,
    log_level,
    module_search_path,
    worker_names,
)
from mvllm_ray.cluster import RayJob
from mvllm_ray.group import RayWorkerGroup, RayWorkerHandle
from mvllm_ray.worker import NearEnds, RayWorkerAnswer, RayWorkerIdentity, RayWorkerStart, own_version

COPIED_PREFIXES = ("MVLLM_", "HF_", "OMP_")
"""How variables begin that workers get from the engine's process, where they have none of their own."""


@dataclass(frozen=True)
class _Placed:
    """An actor and its identity, once it has a rank (its place in a list of these)."""

    actor: Any
    identity: RayWorkerIdentity
    local_rank: int
    local_world_size: int


@dataclass(frozen=True)
class LaunchedActors:
    """Actors that know their ranks and have their ends of the queues; and what the executor has of them.

    Attributes:
        group: Ends the actors. It has not been told to launch the workers in them.
        writer, readers: The executor's ends of the queues.
        activity_table: Where workers on the engine's node say what they do, and the executor what it asked the others for.
        far: Ranks on other nodes.
    """

    group: RayWorkerGroup
    writer: MessageWriter
    readers: list[MessageReader[Reply]]
    activity_table: ActivityTable
    far: tuple[int, ...]


def launch_actors(config: EngineConfig, platform: Platform, topology: LaunchTopology) -> LaunchedActors:
    """Steps 1 to 4 of those above.

    Raises:
        ConfigError: The platform or the cluster does not allow it.
        PlatformError: An actor could not be started. Nothing stays behind.
    """
    resource, limit = _resource_of(platform, topology), config.parallel.start_timeout
    with contextlib.ExitStack() as stack:
        job = RayJob.start(resource, topology, limit)
        stack.callback(job.close)
        placed = _in_order(job, resource, limit)
        names = worker_names(config.parallel, len(placed))
        far = tuple(r for r, worker in enumerate(placed) if worker.identity.node_id != job.node_id)
        activity_table = ActivityTable.create(len(placed))
        stack.callback(activity_table.close)
        workers = []
        for rank, (name, at) in enumerate(zip(names, placed)):
            stack_fd = -1 if rank in far else anonymous_file("stacks")
            workers.append(RayWorkerHandle(name, rank, at.identity, at.actor, stack_fd, activity_table))
        group = RayWorkerGroup(job, workers, activity_table)
        stack.callback(group.close)
        writer, readers = _connect(config, platform, topology, placed, job, group, activity_table)
        stack.pop_all()
    return LaunchedActors(group, writer, readers, activity_table, far)


def _resource_of(platform: Platform, topology: LaunchTopology) -> str:
    if not topology.ray_resource:
        raise ConfigError(
            f"distributed_executor_backend 'ray' was asked for, but the platform {platform.spec.name!r} does not say "
            "which of Ray's resources one of its devices is: its LaunchTopology leaves the field ray_resource unset. "
            "Set it in the platform's topology(), or set distributed_executor_backend to mp."
        )
    return topology.ray_resource


def _in_order(job: RayJob, resource: str, limit: float) -> list[_Placed]:
    """The actors in rank order."""
    answers = job.ask(
        [actor.identify.remote(resource.encode()) for actor in job.actors], limit, "starting them on their nodes"
    )
    identities = [msgspec.msgpack.decode(answer, type=RayWorkerIdentity) for answer in answers]
    own = own_version()
    for identity in identities:
        if identity.version != own:
            raise ConfigError(
                f"Node {identity.node_ip} of the Ray cluster has mvllm {identity.version}, this one has {own}. "
                "Install the same version on every node."
            )
    first_of: dict[str, int] = {}  # node -> its first actor, which is the order of Ray's bundles
    for index, identity in enumerate(identities):
        first_of.setdefault(identity.node_id, index)
    order = sorted(
        range(len(identities)),
        key=lambda i: (
            identities[i].node_id != job.node_id,
            first_of[identities[i].node_id],
            _device_key(identities[i]),
        ),
    )
    sizes = Counter(identity.node_id for identity in identities)
    seen: Counter[str] = Counter()
    placed = []
    for index in order:
        identity = identities[index]
        placed.append(_Placed(job.actors[index], identity, seen[identity.node_id], sizes[identity.node_id]))
        seen[identity.node_id] += 1
    return placed


def _device_key(identity: RayWorkerIdentity) -> tuple[tuple[int, str], ...]:
    return tuple((int(device), "") if device.isdigit() else (1 << 31, device) for device in identity.device_ids)


def _connect(
    config: EngineConfig,
    platform: Platform,
    topology: LaunchTopology,
    placed: Sequence[_Placed],
    job: RayJob,
    group: RayWorkerGroup,
    activity_table: ActivityTable,
) -> tuple[MessageWriter, list[MessageReader[Reply]]]:
    """Tells every actor who it is, and gives it its ends of the queues; returns the executor's."""
    workers = group.workers
    far = [worker.rank for worker in workers if not worker.is_local]
    with contextlib.ExitStack() as stack:
        queues = RpcQueues([worker.name for worker in workers], far, job.node_ip, config.parallel)
        stack.callback(queues.close)  # the workers have what is theirs
        messages = {worker.rank: _parcel(worker, queues, activity_table) for worker in workers if worker.is_local}
        door = FileDescriptorServer(messages)
        stack.callback(door.close)
        starts = _starts(config, platform, topology, workers, placed, queues, door)
        refs = [w.actor.initialize.remote(msgspec.msgpack.encode(start)) for w, start in zip(workers, starts)]
        near = dict(zip(messages, queues.open_readers(group.stop)))
        ends = stack.enter_context(contextlib.ExitStack())  # ours, closed if the start fails
        for reader in near.values():
            ends.callback(reader.close)
        readers = []
        for worker, answer in zip(workers, job.ask(refs, config.parallel.start_timeout, "telling them their ranks")):
            told = msgspec.msgpack.decode(answer, type=RayWorkerAnswer)
            if told.failure:
                raise PlatformError(f"{worker} could not be started: {told.failure}.")
            if worker.is_local:
                connection = door.connection(worker.rank)
                worker.set_control(connection.socket, connection.pid)
            if told.replies is None:
                readers.append(near[worker.rank])
            else:
                readers.append(MessageReader.attach(told.replies, Reply, group.stop))
                ends.callback(readers[-1].close)
        writer = queues.open_writer(group.stop)
        ends.pop_all()
        return writer, readers


def _parcel(worker: RayWorkerHandle, queues: RpcQueues, activity_table: ActivityTable) -> MessageWithFds:
    requests, replies = queues.worker_handles(worker.rank)
    ends = NearEnds(requests, replies, activity_table.fd, worker.stack_fd)
    return MessageWithFds(ends, (*requests.fds, *replies.fds, activity_table.fd, worker.stack_fd))


def _starts(
    config: EngineConfig,
    platform: Platform,
    topology: LaunchTopology,
    workers: Sequence[RayWorkerHandle],
    placed: Sequence[_Placed],
    queues: RpcQueues,
    door: FileDescriptorServer,
) -> list[RayWorkerStart]:
    encoded = encode_worker_configs(config, len(placed))
    host, port = placed[0].identity.node_ip, placed[0].identity.port
    rendezvous = f"tcp://{f'[{host}]' if ':' in host else host}:{port}" if len(placed) > 1 else None
    defaults = {name: value for name, value in os.environ.items() if name.startswith(COPIED_PREFIXES)}
    starts = []
    is_spread = len({at.identity.node_id for at in placed}) > 1
    for worker, at in zip(workers, placed):
        context = WorkerContext(
            rank=worker.rank,
            local_rank=at.local_rank,
            world_size=len(placed),
            local_world_size=at.local_world_size,
            seed=config.model.seed,
            in_engine_process=False,
            init_method=rendezvous,
            num_devices=devices_per_worker(config.parallel, len(placed)),
        )
        starts.append(
            RayWorkerStart(
                name=worker.name,
                context=context,
                platform=platform.spec.name,
                config=encoded[worker.rank],
                environment=_environment(topology, worker.rank, at, placed),
                defaults=defaults,
                sys_path=module_search_path(),
                directory=os.getcwd(),
                log_level=log_level(),
                door=door.address if worker.is_local else None,
                requests=None if worker.is_local else queues.remote_worker_handle(worker.rank),
                is_spread=is_spread,
            )
        )
    return starts


def _environment(topology: LaunchTopology, rank: int, own: _Placed, placed: Sequence[_Placed]) -> dict[str, str]:
    """The platform's variables; which devices they name is Ray's to say, where Ray numbers them."""
    environment = dict(topology.env_per_worker[rank]) if topology.env_per_worker else {}
    if topology.device_variable and own.identity.device_ids:
        here = [at.identity for at in placed if at.identity.node_id == own.identity.node_id]
        environment[topology.device_variable] = ",".join(device for at in here for device in at.device_ids)
    return environment

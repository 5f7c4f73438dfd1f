"""Starts the actors of an engine: placement, ranks, environments and queues. RpcExecutor makes the calls.

1. reserve     a bundle for each worker, in the current placement group or in a new one
2. identify    each actor reports its node and the devices that Ray assigned to it
3. order       the engine's node first, then node by node, so that consecutive ranks share nodes
4. initialize  name, rank, environment; queues in shared memory on the engine's node, over TCP on others
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
    ConfigError,
    EngineConfig,
    LaunchTopology,
    Platform,
    PlatformError,
    WorkerContext,
)
from mvllm.extension_api.remote_executors import (
    ActivityTable,
    MessageReader,
    MessageWriter,
    Reply,
    RpcQueues,
    anonymous_file,
    devices_per_worker,
    encode_worker_configs,
    log_level,
    module_search_path,
    worker_names,
)
from mvllm_ray.cluster import RayJob
from mvllm_ray.fd_server import FileDescriptorServer, MessageWithFds
from mvllm_ray.group import RayWorkerGroup, RayWorkerHandle
from mvllm_ray.resources import require_resource
from mvllm_ray.worker import InitializeResult, LocalHandles, RayWorkerIdentity, RayWorkerStart, own_version

COPIED_PREFIXES = ("MVLLM_", "HF_", "OMP_")
"""Prefixes of the environment variables that workers inherit from the engine's process, unless their node sets them."""


@dataclass(frozen=True)
class _RankedActor:
    """An actor and its identity; its rank is its index in a list of these."""

    actor: Any
    identity: RayWorkerIdentity
    local_rank: int
    local_world_size: int


@dataclass(frozen=True)
class LaunchedActors:
    """Initialized actors and the executor's ends of the queues.

    Attributes:
        group: The group of the actors; `launch` has not been called.
        writer, readers: The executor's ends of the queues.
        activity_table: Where local workers write their activity, and the executor the requests it sent to the others.
        remote_ranks: The ranks on other nodes.
    """

    group: RayWorkerGroup
    writer: MessageWriter
    readers: list[MessageReader[Reply]]
    activity_table: ActivityTable
    remote_ranks: tuple[int, ...]


def launch_actors(config: EngineConfig, platform: Platform, topology: LaunchTopology) -> LaunchedActors:
    """Steps 1 to 4 of the module's docstring.

    Raises:
        ConfigError: The platform or the cluster does not allow it.
        PlatformError: An actor could not be started. All actors have ended then.
    """
    parallel = config.parallel
    resource, limit = require_resource(platform.spec.name, topology), parallel.start_timeout
    with contextlib.ExitStack() as stack:
        job = RayJob.start(resource, topology, limit, parallel.data_parallel_rank, parallel.data_parallel_size)
        stack.callback(job.close)
        actors = _assign_ranks(job, resource, limit)
        names = worker_names(parallel, len(actors))
        remote_ranks = tuple(r for r, actor in enumerate(actors) if actor.identity.node_id != job.node_id)
        activity_table = ActivityTable.create(len(actors))
        stack.callback(activity_table.close)
        workers = []
        for rank, (name, actor) in enumerate(zip(names, actors)):
            stack_fd = -1 if rank in remote_ranks else anonymous_file("stacks")
            workers.append(RayWorkerHandle(name, rank, actor.identity, actor.actor, stack_fd, activity_table))
        group = RayWorkerGroup(job, workers, activity_table)
        stack.callback(group.close)
        writer, readers = _initialize_actors(config, platform, topology, actors, job, group, activity_table)
        stack.pop_all()
    return LaunchedActors(group, writer, readers, activity_table, remote_ranks)


def _assign_ranks(job: RayJob, resource: str, limit: float) -> list[_RankedActor]:
    """The actors in rank order."""
    answers = job.wait_results(
        [actor.identify.remote(resource.encode()) for actor in job.actors], limit, "starting them on their nodes"
    )
    identities = [msgspec.msgpack.decode(answer, type=RayWorkerIdentity) for answer in answers]
    version = own_version()
    for identity in identities:
        if identity.version != version:
            raise ConfigError(
                f"Node {identity.node_ip} of the Ray cluster has mvllm {identity.version}, this one has {version}. "
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
    actors = []
    for index in order:
        identity = identities[index]
        actors.append(_RankedActor(job.actors[index], identity, seen[identity.node_id], sizes[identity.node_id]))
        seen[identity.node_id] += 1
    return actors


def _device_key(identity: RayWorkerIdentity) -> tuple[tuple[int, str], ...]:
    return tuple((int(device), "") if device.isdigit() else (1 << 31, device) for device in identity.device_ids)


def _initialize_actors(
    config: EngineConfig,
    platform: Platform,
    topology: LaunchTopology,
    actors: Sequence[_RankedActor],
    job: RayJob,
    group: RayWorkerGroup,
    activity_table: ActivityTable,
) -> tuple[MessageWriter, list[MessageReader[Reply]]]:
    """Sends every actor its start message and its ends of the queues; returns the executor's ends."""
    workers = group.workers
    remote_ranks = [worker.rank for worker in workers if not worker.is_local]
    with contextlib.ExitStack() as stack:
        queues = RpcQueues([worker.name for worker in workers], remote_ranks, job.node_ip, config.parallel)
        stack.callback(queues.close)  # the workers have their descriptors
        messages = {
            worker.rank: _local_message(worker, queues, activity_table) for worker in workers if worker.is_local
        }
        server = FileDescriptorServer(messages)
        stack.callback(server.close)
        starts = _start_messages(config, platform, topology, workers, actors, queues, server)
        refs = [w.actor.initialize.remote(msgspec.msgpack.encode(start)) for w, start in zip(workers, starts)]
        local_readers = dict(zip(messages, queues.open_readers(group.stop)))
        undo = stack.enter_context(contextlib.ExitStack())  # closes the executor's readers if the start fails
        for reader in local_readers.values():
            undo.callback(reader.close)
        readers = []
        for worker, answer in zip(workers, job.wait_results(refs, config.parallel.start_timeout, "initializing them")):
            result = msgspec.msgpack.decode(answer, type=InitializeResult)
            if result.failure:
                raise PlatformError(f"{worker} could not be started: {result.failure}.")
            if worker.is_local:
                connection = server.connection(worker.rank)
                worker.set_control(connection.socket, connection.pid)
            if result.replies is None:
                readers.append(local_readers[worker.rank])
            else:
                readers.append(MessageReader.attach(result.replies, Reply, group.stop))
                undo.callback(readers[-1].close)
        writer = queues.open_writer(group.stop)
        undo.pop_all()
        return writer, readers


def _local_message(worker: RayWorkerHandle, queues: RpcQueues, activity_table: ActivityTable) -> MessageWithFds:
    requests, replies = queues.worker_handles(worker.rank)
    handles = LocalHandles(requests, replies, activity_table.fd, worker.stack_fd)
    return MessageWithFds(handles, (*requests.fds, *replies.fds, activity_table.fd, worker.stack_fd))


def _start_messages(
    config: EngineConfig,
    platform: Platform,
    topology: LaunchTopology,
    workers: Sequence[RayWorkerHandle],
    actors: Sequence[_RankedActor],
    queues: RpcQueues,
    server: FileDescriptorServer,
) -> list[RayWorkerStart]:
    encoded = encode_worker_configs(config, len(actors))
    host, port = actors[0].identity.node_ip, actors[0].identity.port
    rendezvous = f"tcp://{f'[{host}]' if ':' in host else host}:{port}" if len(actors) > 1 else None
    defaults = {name: value for name, value in os.environ.items() if name.startswith(COPIED_PREFIXES)}
    starts = []
    is_spread = len({actor.identity.node_id for actor in actors}) > 1
    for worker, actor in zip(workers, actors):
        context = WorkerContext(
            rank=worker.rank,
            local_rank=actor.local_rank,
            world_size=len(actors),
            local_world_size=actor.local_world_size,
            seed=config.model.seed,
            in_engine_process=False,
            init_method=rendezvous,
            num_devices=devices_per_worker(config.parallel, len(actors)),
        )
        starts.append(
            RayWorkerStart(
                name=worker.name,
                context=context,
                platform=platform.spec.name,
                config=encoded[worker.rank],
                environment=_environment(topology, worker.rank, actor, actors),
                defaults=defaults,
                sys_path=module_search_path(),
                directory=os.getcwd(),
                log_level=log_level(),
                fd_server=server.address if worker.is_local else None,
                requests=None if worker.is_local else queues.remote_worker_handle(worker.rank),
                is_spread=is_spread,
            )
        )
    return starts


def _environment(
    topology: LaunchTopology, rank: int, own: _RankedActor, actors: Sequence[_RankedActor]
) -> dict[str, str]:
    """The platform's variables, with the devices that Ray assigned where Ray numbers them."""
    environment = dict(topology.env_per_worker[rank]) if topology.env_per_worker else {}
    if topology.device_variable and own.identity.device_ids:
        on_node = [actor for actor in actors if actor.identity.node_id == own.identity.node_id]
        environment[topology.device_variable] = ",".join(id for actor in on_node for id in actor.identity.device_ids)
    return environment

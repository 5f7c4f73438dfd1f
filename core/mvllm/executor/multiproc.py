"""The executor `mp`: starts one process per worker on this machine. RpcExecutor makes the calls."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from mvllm.config.engine_config import EngineConfig
from mvllm.executor.config_codec import encode_worker_configs
from mvllm.executor.process.activity_table import ActivityTable
from mvllm.executor.process.child_process_group import ChildProcessGroup, ProcessLaunch
from mvllm.executor.process.handshake import WorkerStartArgs
from mvllm.executor.process.process_utils import anonymous_file, ensure_standard_streams
from mvllm.executor.rpc_executor import RpcExecutor, worker_names
from mvllm.executor.rpc_queues import RpcQueues
from mvllm.executor.worker_topology import devices_per_worker, launch_topology
from mvllm.platform.interface import Platform
from mvllm.platform.topology import LaunchTopology, WorkerContext

_HAS_PROC = os.path.isdir("/proc/self/fd")


class MultiprocExecutor(RpcExecutor):
    """Starts one process per worker, with the environment that the platform sets for it.

    Raises:
        Exception: On construction: a worker's own exception, if one cannot be built. All processes have ended then.
    """

    def __init__(self, config: EngineConfig, platform: Platform) -> None:
        topology = launch_topology(config, platform)
        ensure_standard_streams()
        super().__init__(config, platform, topology.num_workers)
        names = worker_names(config.parallel, topology.num_workers)
        with contextlib.ExitStack() as undo:
            activity_table = ActivityTable.create(len(names))
            undo.callback(activity_table.close)
            queues = RpcQueues(names, parallel=config.parallel)
            undo.callback(queues.close)
            rendezvous = _make_rendezvous() if len(names) > 1 else None
            launches = _launches(config, platform, topology, names, queues, rendezvous, activity_table)
            group = ChildProcessGroup(launches, activity_table)
            self._attach_workers(group, queues.open_writer(group.stop), queues.open_readers(group.stop), activity_table)
            undo.pop_all()  # `shutdown` closes them from here on
        try:
            try:
                group.launch()
            finally:  # the workers have inherited their descriptors
                queues.close()
                if rendezvous is not None:
                    rendezvous.close()
            group.wait_ready(config.parallel.start_timeout)
        except BaseException:
            self.shutdown()
            raise


def _launches(
    config: EngineConfig,
    platform: Platform,
    topology: LaunchTopology,
    names: Sequence[str],
    queues: RpcQueues,
    rendezvous: _Rendezvous | None,
    activity_table: ActivityTable,
) -> list[ProcessLaunch]:
    encoded = encode_worker_configs(config, len(names))
    parallel = config.parallel
    launches = []
    for rank, name in enumerate(names):
        requests, replies = queues.worker_handles(rank)
        start = WorkerStartArgs(
            name=name,
            context=WorkerContext(
                rank=rank,
                local_rank=parallel.data_parallel_rank * len(names) + rank,
                world_size=len(names),
                local_world_size=parallel.data_parallel_size * len(names),
                seed=config.model.seed,
                in_engine_process=False,
                init_method=rendezvous.address if rendezvous else None,
                num_devices=devices_per_worker(parallel, len(names)),
            ),
            platform=platform.spec.name,
            config=encoded[rank],
            requests=requests,
            replies=replies,
        ).with_parent_state(activity_table.fd)
        env = topology.env_per_worker[rank] if topology.env_per_worker else {}
        shared = (activity_table.fd, *(rendezvous.fds if rendezvous else ()))
        launches.append(ProcessLaunch(start, env, (*requests.fds, *replies.fds, start.stack_fd, *shared)))
    return launches


@dataclass(frozen=True)
class _Rendezvous:
    """The address of `init_method`, and the descriptors that workers must inherit for it."""

    address: str
    fds: tuple[int, ...] = ()

    def close(self) -> None:
        """Closes the descriptors of this process. Call it after the workers have inherited them."""
        for fd in self.fds:
            os.close(fd)


def _make_rendezvous() -> _Rendezvous:
    """An unnamed file on Linux, which needs no port and leaves nothing behind; elsewhere a free TCP port."""
    if _HAS_PROC:
        fd = anonymous_file("rendezvous")
        return _Rendezvous(f"file:///proc/self/fd/{fd}", (fd,))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return _Rendezvous(f"tcp://127.0.0.1:{probe.getsockname()[1]}")

"""RayDistributedExecutor. Ray is imported when an engine starts, not with this module."""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

from mvllm.extension_api import (
    ConfigError,
    EngineConfig,
    LaunchTopology,
    Platform,
    install_command,
)
from mvllm.extension_api.remote_executors import (
    Reply,
    RpcExecutor,
    RPCRequest,
    launch_topology,
)
from mvllm_ray.resources import find_resource

_STEP_METHOD = "execute_model"


class RayDistributedExecutor(RpcExecutor):
    """Runs one Ray actor per worker.

    Raises:
        ConfigError: On construction: Ray cannot be imported, or the platform or the cluster does not allow it.
        Exception: A worker's own exception, if one cannot be built. All actors have ended then.
    """

    needs_platform_support = True

    @classmethod
    def is_preferred(cls, topology: LaunchTopology, count_devices: Callable[[], int | None], *, platform: str) -> bool:
        """In a placement group; and if there is a cluster and this machine has too few devices."""
        if not find_resource(platform, topology):
            return False
        needed = topology.num_workers * topology.devices_per_worker
        return _in_placement_group() or (_is_cluster_there() and needed > (count_devices() or needed))

    def __init__(self, config: EngineConfig, platform: Platform) -> None:
        _require_ray()
        from mvllm_ray.launch import launch_actors

        topology = launch_topology(config, platform)
        super().__init__(config, platform, topology.num_workers)
        launched = launch_actors(config, platform, topology)
        self._remote_ranks = launched.remote_ranks
        self._activity_table = launched.activity_table
        self._attach_workers(launched.group, launched.writer, launched.readers, launched.activity_table)
        atexit.register(self._finalizer)  # called before Ray's exit handler, which was registered earlier
        try:
            launched.group.launch()
            launched.group.wait_ready(config.parallel.start_timeout)
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        super().shutdown()
        atexit.unregister(self._finalizer)

    # Workers on other nodes cannot write to the activity table, so these hooks write their pending requests to it.

    def _on_request_sent(self, request: RPCRequest, args: tuple[Any, ...]) -> None:
        for rank in self._remote_ranks:
            if request.is_addressed_to(rank):
                step = args[0].step if request.method == _STEP_METHOD else -1
                self._activity_table.write(rank, request.method, request.id, step)

    def _on_reply(self, reply: Reply, method: str | None) -> None:
        for rank in self._remote_ranks:
            # The rank that replies to a step needed the others for it, so all have executed it.
            has_finished = reply.rank == rank or method == _STEP_METHOD
            if has_finished and self._activity_table.read(rank).request_id <= reply.id:
                self._activity_table.write_idle(rank, reply.id)


def _in_placement_group() -> bool:
    """Whether this process runs inside a Ray placement group. Never imports Ray."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return False
    from ray.util import get_current_placement_group

    return get_current_placement_group() is not None


def _is_cluster_there() -> bool:
    """Whether this process has initialized Ray, or RAY_ADDRESS is set and Ray is installed."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return True
    return bool(os.environ.get("RAY_ADDRESS")) and importlib.util.find_spec("ray") is not None


def _require_ray() -> None:
    try:
        importlib.import_module("ray")
    except ImportError as e:
        raise ConfigError(
            f"distributed_executor_backend 'ray' was asked for, but Ray cannot be imported ({e}). "
            f"Run: {install_command('ray>=2.50,<3')}, on every node; or set distributed_executor_backend to mp to stay "
            "on this machine."
        ) from e

"""The calls to Ray: connecting, placement groups, actors, and their termination.

Every wait for Ray is a short one in a loop: a thread that is inside Ray when the interpreter ends crashes it.
"""

from __future__ import annotations

import inspect
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import ray.util
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mvllm.extension_api import ConfigError, LaunchTopology, PlatformError, get_logger
from mvllm_ray.worker import RayWorker, own_version

logger = get_logger("mvllm.ray.cluster")

_WARN_SECONDS = 30.0
_LOCAL_NODE_SECONDS = 5.0  # wait for a bundle on this node before any node is accepted
_SLICE_SECONDS = 0.2
_NODE_LABEL = "ray.io/node-id"

PLACEMENT_GROUP_VARIABLE = "RAY_MVLLM_PLACEMENT_GROUP"
"""Environment variable with the id of the placement group for the workers, in hexadecimal digits. It is for engines in
processes that an actor has started: Ray knows the group of the actor, but not that of its child processes."""


class RayJob:
    """The actors of one engine and their placement group. Made by `start`.

    Attributes:
        node_id, node_ip: The node of this process.
        actors: One per worker, in no particular order of nodes.
    """

    def __init__(self, *, owns_ray: bool) -> None:
        self._owns_ray = owns_ray
        self._group: PlacementGroup | None = None
        self._is_closed = False
        self.node_id: str = ray.get_runtime_context().get_node_id()
        self.node_ip: str = ray.util.get_node_ip_address()
        self.actors: list[Any] = []

    @classmethod
    def start(
        cls, resource: str, topology: LaunchTopology, timeout: float, replica: int = 0, num_replicas: int = 1
    ) -> RayJob:
        """Connects to Ray, reserves a bundle for each worker, and creates an actor in it.

        Args:
            resource: Ray's name of the resource that one device is.
            topology: The number of workers and of devices per worker.
            timeout: Seconds to wait for the resources.
            replica: The data-parallel rank of the engine core.
            num_replicas: Engine cores of the same engine; each starts a job of its own.

        Raises:
            ConfigError: There is no such cluster, or it has too few resources.
            PlatformError: The resources were not free within the timeout.
        """
        job = cls(owns_ray=connect())
        try:
            resources = {resource: float(topology.devices_per_worker)}
            group, bundle_indices = job._reserve_bundles(
                resources, topology.num_workers, timeout, replica, num_replicas
            )
            job._create_actors(group, bundle_indices, resources)
        except BaseException:
            job.close()
            raise
        return job

    def wait_results(self, refs: Sequence[Any], timeout: float, what: str) -> list[bytes]:
        """The results of pending actor calls.

        Args:
            refs: The calls.
            timeout: Seconds to wait for all of them.
            what: The purpose of the calls, for errors and logs.

        Raises:
            PlatformError: An actor could not be started, has ended, or did not answer in time.
        """
        begin = time.monotonic()
        warn_at = begin + _WARN_SECONDS
        while len(done := ready(refs, _SLICE_SECONDS)) < len(refs):
            for ref in done:
                _result(ref, what)  # raises a failure before the others have answered
            seconds = time.monotonic() - begin
            if seconds > timeout:
                raise PlatformError(
                    f"{len(refs) - len(done)} of {len(refs)} Ray actors have not answered within {timeout:g} s: {what}."
                    " If the engine runs inside a placement group, its own task may occupy a bundle that a worker "
                    "needs: give the task no resources (num_cpus=0). See also `ray status`."
                )
            if time.monotonic() > warn_at:
                warn_at += _WARN_SECONDS
                logger.warning("Waiting for %d of %d Ray actors: %s", len(refs) - len(done), len(refs), what)
        return [_result(ref, what) for ref in refs]

    def kill(self) -> None:
        """Kills every actor and removes the placement group. Idempotent."""
        actors, self.actors = self.actors, []
        group, self._group = self._group, None
        if not ray.is_initialized():  # the program has disconnected from Ray, which ends the actors
            return
        for actor in actors:
            ray.kill(actor, no_restart=True)
        if group is not None:
            ray.util.remove_placement_group(group)

    def close(self) -> None:
        """Kills the actors, and shuts Ray down if `start` has initialized it. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self.kill()
        if self._owns_ray and ray.is_initialized():
            ray.shutdown()

    def _reserve_bundles(
        self, resources: Mapping[str, float], count: int, timeout: float, replica: int, num_replicas: int
    ) -> tuple[PlacementGroup, list[int]]:
        """A placement group, and the bundle index of each worker. A given group is shared by all replicas."""
        current = _given_placement_group() or ray.util.get_current_placement_group()
        if current is not None:
            indices = _assign_bundles(current.bundle_specs, resources, count * num_replicas)
            return current, indices[count * replica : count * (replica + 1)]
        ((resource, amount),) = resources.items()
        total = ray.cluster_resources().get(resource, 0.0)
        if total < amount * count * num_replicas:
            raise ConfigError(
                f"{count * num_replicas} workers need {amount * count * num_replicas:g} of Ray's resource "
                f"{resource!r}, and the Ray cluster has {total:g} on "
                f"{len([node for node in ray.nodes() if node['Alive']])} node(s). Add nodes (`ray start "
                "--address=...`), lower tensor_parallel_size, pipeline_parallel_size or data_parallel_size, or set "
                "distributed_executor_backend to mp to use this machine without Ray."
            )
        local_amount = next(
            (node["Resources"].get(resource, 0) for node in ray.nodes() if node["NodeID"] == self.node_id), 0
        )
        if local_amount >= amount:  # at least one bundle on this node, so that rank 0 is local
            selectors: list[dict[str, str]] = [{_NODE_LABEL: self.node_id}, *[{} for _ in range(count - 1)]]
            self._group = ray.util.placement_group([dict(resources)] * count, "PACK", bundle_label_selector=selectors)
            if self._wait_placed(min(timeout, _LOCAL_NODE_SECONDS)):
                return self._group, list(range(count))
            ray.util.remove_placement_group(self._group)
        self._group = ray.util.placement_group([dict(resources)] * count, "PACK")
        if not self._wait_placed(timeout):
            raise PlatformError(
                f"The Ray cluster has {total:g} of the resource {resource!r}, but {amount * count:g} were not free "
                f"within {timeout:g} s. `ray status` says what uses them."
            )
        return self._group, list(range(count))

    def _wait_placed(self, timeout: float) -> bool:
        assert self._group is not None
        placed = self._group.ready()
        deadline, warn_at = time.monotonic() + timeout, time.monotonic() + _WARN_SECONDS
        while not ready([placed], _SLICE_SECONDS):
            if time.monotonic() > deadline:
                return False
            if time.monotonic() > warn_at:
                warn_at += _WARN_SECONDS
                logger.warning("Waiting for free resources in the Ray cluster: %s", self._group.bundle_specs)
        return True

    def _create_actors(
        self, group: PlacementGroup, bundle_indices: Sequence[int], resources: Mapping[str, float]
    ) -> None:
        remote: Any = ray.remote  # its annotations lack this argument
        actor_class = remote(concurrency_groups={"control": 1})(RayWorker)
        ((resource, amount),) = resources.items()
        for index in bundle_indices:
            options = {"num_cpus": 0, "max_restarts": 0, **_resource_options(resource, amount)}
            strategy = PlacementGroupSchedulingStrategy(group, index, placement_group_capture_child_tasks=False)
            self.actors.append(actor_class.options(scheduling_strategy=strategy, **options).remote())


def connect() -> bool:
    """Connects to the cluster at RAY_ADDRESS or to one on this machine, or starts one on this machine.

    Returns:
        Whether this call initialized Ray, so that the engine has to shut it down.

    Raises:
        ConfigError: RAY_ADDRESS names a cluster that does not answer.
    """
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if in_main_thread else None
    try:
        ray.init(include_dashboard=False)
    except (ConnectionError, RuntimeError, ValueError) as e:
        address = os.environ.get("RAY_ADDRESS")
        target = f"the cluster at RAY_ADDRESS={address}" if address else "Ray on this machine"
        raise ConfigError(
            f"distributed_executor_backend 'ray' was asked for, but {target} cannot be reached or started: {e}. Start "
            "one with `ray start --head`, or unset RAY_ADDRESS, or set distributed_executor_backend to mp."
        ) from e
    if before is not None and before is not signal.SIG_DFL:
        signal.signal(signal.SIGTERM, before)  # Ray has replaced the program's handler
    return True


def ready(refs: Sequence[Any], timeout: float = 0.0) -> list[Any]:
    """The calls that have ended, with a result or an error; waits up to `timeout` seconds for all of them."""
    if not refs:
        return []
    done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout)
    return list(done)


def summary_of(error: BaseException) -> str:
    """Ray's account of the end of an actor, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    account = [
        line for line in lines[1:] if not line.startswith(("class_name:", "actor_id:", "pid:", "namespace:", "ip:"))
    ]
    return " ".join(account or lines)[:600]


def _result(ref: Any, what: str) -> bytes:
    try:
        return ray.get(ref)
    except RayError as e:
        raise PlatformError(
            f"A Ray actor for a worker could not be started or has ended: {what}: {summary_of(e)}\nEvery node needs "
            f"mvllm {own_version()}, the platform's package, and the same Python; the actor's log is in "
            "the folder session_latest/logs of Ray's temporary folder there."
        ) from e


def _given_placement_group() -> PlacementGroup | None:
    """The placement group that the environment names.

    Raises:
        ConfigError: There is no such group.
    """
    digits = os.environ.get(PLACEMENT_GROUP_VARIABLE)
    if not digits:
        return None
    try:
        group = PlacementGroup(ray.PlacementGroupID(bytes.fromhex(digits)))
        if group.bundle_specs:
            return group
        reason = "it has no bundles"
    except (RayError, ValueError, AssertionError) as e:
        reason = str(e)
    raise ConfigError(
        f"The variable {PLACEMENT_GROUP_VARIABLE} names the placement group {digits!r}, which this Ray cluster does "
        f"not have ({reason}). Unset it, or set it to the id of a group."
    )


def _assign_bundles(bundles: Sequence[Mapping[str, float]], resources: Mapping[str, float], count: int) -> list[int]:
    """The bundle index of each worker, in order; a bundle may hold several workers."""
    ((resource, amount),) = resources.items()
    indices = [index for index, bundle in enumerate(bundles) for _ in range(int(bundle.get(resource, 0) // amount))]
    if len(indices) < count:
        raise ConfigError(
            f"The engine runs inside a Ray placement group, whose bundles {list(map(dict, bundles))} have room for "
            f"{len(indices)} workers of {amount:g} {resource!r} each; {count} are needed. Give the group "
            f"{count} bundles of {dict(resources)}, or set distributed_executor_backend to mp."
        )
    return indices[:count]


def _resource_options(resource: str, amount: float) -> dict[str, Any]:
    """The actor options that request a resource: a keyword for those that Ray has one for, otherwise by name."""
    keyword = f"num_{resource.lower()}s"
    if keyword in inspect.signature(ray.init).parameters:
        return {keyword: amount}
    return {"resources": {resource: amount}}

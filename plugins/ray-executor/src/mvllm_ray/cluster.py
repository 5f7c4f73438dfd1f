"""What the Ray executor asks of Ray itself: a connection, a place for every worker, actors there, and their end.

Every wait for Ray is a short one in a loop: a thread that sits inside Ray when the interpreter ends crashes it.
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
_NEAR_SECONDS = 5.0  # how long a place on our own node is waited for before any node will do
_SLICE_SECONDS = 0.2
_NODE_LABEL = "ray.io/node-id"


class RayJob:
    """The actors of one engine and what was claimed for them. Made by `start`.

    Attributes:
        node_id, node_ip: The node that this process is on.
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
    def start(cls, resource: str, topology: LaunchTopology, timeout: float) -> RayJob:
        """Connects to Ray, claims a place for each worker, and creates an actor there.

        Args:
            resource: Ray's name of what one device is.
            topology: How many workers, of how many devices.
            timeout: Seconds to wait for places.

        Raises:
            ConfigError: There is no such cluster, or it does not have what is needed.
            PlatformError: It has, but not within the timeout.
        """
        job = cls(owns_ray=connect())
        try:
            share = {resource: float(topology.devices_per_worker)}
            group, places = job._place(share, topology.num_workers, timeout)
            job._create_actors(group, places, share)
        except BaseException:
            job.close()
            raise
        return job

    def ask(self, refs: Sequence[Any], timeout: float, what: str) -> list[bytes]:
        """The answers of actors that were asked for something.

        Raises:
            PlatformError: An actor could not be started or has ended, or did not answer in time.
        """
        begin = time.monotonic()
        warn_at = begin + _WARN_SECONDS
        while len(done := ready(refs, _SLICE_SECONDS)) < len(refs):
            for ref in done:
                _result(ref, what)  # a failure need not wait for the others
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
        """Ends every actor, whatever it is doing, and gives back their places. Idempotent."""
        actors, self.actors = self.actors, []
        group, self._group = self._group, None
        if not ray.is_initialized():  # somebody has left the cluster, which ends them just so
            return
        for actor in actors:
            ray.kill(actor, no_restart=True)
        if group is not None:
            ray.util.remove_placement_group(group)

    def close(self) -> None:
        """Ends the actors, and Ray where it was started for them. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self.kill()
        if self._owns_ray and ray.is_initialized():
            ray.shutdown()

    def _place(self, share: Mapping[str, float], count: int, timeout: float) -> tuple[PlacementGroup, list[int]]:
        """A placement group, and for each worker the index of its bundle."""
        current = ray.util.get_current_placement_group()
        if current is not None:
            return current, _slots(current.bundle_specs, share, count)
        ((resource, amount),) = share.items()
        total = ray.cluster_resources().get(resource, 0.0)
        if total < amount * count:
            raise ConfigError(
                f"{count} workers need {amount * count:g} of Ray's resource {resource!r}, and the Ray cluster has "
                f"{total:g} on {len([node for node in ray.nodes() if node['Alive']])} node(s). Add nodes (`ray start "
                "--address=...`), lower tensor_parallel_size or pipeline_parallel_size, or set "
                "distributed_executor_backend to mp to use this machine without Ray."
            )
        near = next((node["Resources"].get(resource, 0) for node in ray.nodes() if node["NodeID"] == self.node_id), 0)
        if near >= amount:  # one bundle here at least, so that rank 0 is
            here: list[dict[str, str]] = [{_NODE_LABEL: self.node_id}, *[{} for _ in range(count - 1)]]
            self._group = ray.util.placement_group([dict(share)] * count, "PACK", bundle_label_selector=here)
            if self._wait_placed(min(timeout, _NEAR_SECONDS)):
                return self._group, list(range(count))
            ray.util.remove_placement_group(self._group)
        self._group = ray.util.placement_group([dict(share)] * count, "PACK")
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
                logger.warning("Waiting for room in the Ray cluster: %s", self._group.bundle_specs)
        return True

    def _create_actors(self, group: PlacementGroup, places: Sequence[int], share: Mapping[str, float]) -> None:
        remote: Any = ray.remote  # its annotations leave out this argument
        actor_class = remote(concurrency_groups={"control": 1})(RayWorker)
        ((resource, amount),) = share.items()
        for index in places:
            options = {"num_cpus": 0, "max_restarts": 0, **_claim(resource, amount)}
            strategy = PlacementGroupSchedulingStrategy(group, index, placement_group_capture_child_tasks=False)
            self.actors.append(actor_class.options(scheduling_strategy=strategy, **options).remote())


def connect() -> bool:
    """Connects to the cluster that is there (RAY_ADDRESS, or one started on this machine), or starts one here.

    Returns:
        Whether it was this call: then Ray is ours to shut down.

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
        asked = f"the cluster at RAY_ADDRESS={address}" if address else "Ray on this machine"
        raise ConfigError(
            f"distributed_executor_backend 'ray' was asked for, but {asked} cannot be reached or started: {e}. Start "
            "one with `ray start --head`, or unset RAY_ADDRESS, or set distributed_executor_backend to mp."
        ) from e
    if before is not None and before is not signal.SIG_DFL:
        signal.signal(signal.SIGTERM, before)  # Ray has replaced the program's own
    return True


def ready(refs: Sequence[Any], timeout: float = 0.0) -> list[Any]:
    """Those whose result is there, failures included; waits up to `timeout` seconds for all of them."""
    if not refs:
        return []
    done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout)
    return list(done)


def summary_of(error: BaseException) -> str:
    """What Ray says about the end of an actor, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [
        line for line in lines[1:] if not line.startswith(("class_name:", "actor_id:", "pid:", "namespace:", "ip:"))
    ]
    return " ".join(told or lines)[:600]


def _result(ref: Any, what: str) -> bytes:
    try:
        return ray.get(ref)
    except RayError as e:
        raise PlatformError(
            f"A Ray actor for a worker could not be started or has ended: {what}: {summary_of(e)}\nEvery node needs "
            f"mvllm {own_version()}, the platform's package, and the same Python; an actor's own lines are in "
            "the folder session_latest/logs of Ray's temporary folder there."
        ) from e


def _slots(bundles: Sequence[Mapping[str, float]], share: Mapping[str, float], count: int) -> list[int]:
    """For each worker the bundle that it goes to, in order; a bundle may have room for several."""
    ((resource, amount),) = share.items()
    slots = [index for index, bundle in enumerate(bundles) for _ in range(int(bundle.get(resource, 0) // amount))]
    if len(slots) < count:
        raise ConfigError(
            f"The engine runs inside a Ray placement group, whose bundles {list(map(dict, bundles))} have room for "
            f"{len(slots)} workers of {amount:g} {resource!r} each; {count} are needed. Give the group "
            f"{count} bundles of {dict(share)}, or set distributed_executor_backend to mp."
        )
    return slots[:count]


def _claim(resource: str, amount: float) -> dict[str, Any]:
    """Actor options that claim a resource: Ray has keywords for a few, and wants all others by name."""
    keyword = f"num_{resource.lower()}s"
    if keyword in inspect.signature(ray.init).parameters:
        return {keyword: amount}
    return {"resources": {resource: amount}}

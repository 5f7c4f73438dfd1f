"""The number of workers and of devices per worker, and checks that core's worker supports them.

tensor_parallel_size = 4, pipeline_parallel_size = 2, two devices per worker

ranks      0 1 | 2 3     4 5 | 6 7        one per device
workers     0  |  1       2  |  3         one per process; the groups below consist of workers
tp groups    (0, 1)        (2, 3)
pp groups    (0, 2) and (1, 3)
"""

from __future__ import annotations

from dataclasses import replace

from mvllm.config.engine_config import EngineConfig, ParallelConfig
from mvllm.errors import ConfigError, PlatformError
from mvllm.platform.checked_calls import call_checked
from mvllm.platform.interface import Platform
from mvllm.platform.phases import Phase, enter_phase
from mvllm.platform.topology import LaunchTopology
from mvllm.platform.worker_class import default_worker_class, own_worker_class


def launch_topology(config: EngineConfig, platform: Platform) -> LaunchTopology:
    """The platform's LaunchTopology for the workers of this engine.

    Raises:
        PlatformError: `topology()` of the platform failed.
    """
    with enter_phase(Phase.ENGINE):
        topology: LaunchTopology = call_checked(platform, "topology", config.parallel, returns=LaunchTopology)
    return topology


def devices_per_worker(parallel: ParallelConfig, num_workers: int) -> int:
    """`WorkerContext.num_devices` of an engine with `num_workers` workers."""
    return max(1, parallel.world_size // num_workers)


def with_workers_as_ranks(parallel: ParallelConfig, num_devices: int) -> ParallelConfig:
    """The configuration with `tensor_parallel_size` counted in workers that drive `num_devices` devices each."""
    if num_devices == 1 or parallel.tensor_parallel_size % num_devices:
        return parallel
    return replace(parallel, tensor_parallel_size=parallel.tensor_parallel_size // num_devices)


def check_topology(config: EngineConfig, platform: Platform, topology: LaunchTopology) -> None:
    """Checks that core's worker supports the topology. A platform's own worker class is not checked.

    Raises:
        PlatformError: The package with the worker is missing, or the topology has too few devices, or more per worker
            than the platform supports.
        ConfigError: One worker would hold several pipeline stages, or the platform lacks a collective.
    """
    if own_worker_class(platform) is not None:
        return
    default_worker_class(platform)
    parallel, name = config.parallel, platform.spec.name
    world_size, num_workers = parallel.world_size, topology.num_workers
    requested = (
        f"tensor_parallel_size {parallel.tensor_parallel_size} × pipeline_parallel_size "
        f"{parallel.pipeline_parallel_size} makes {world_size} ranks"
    )
    num_devices = devices_per_worker(parallel, num_workers)
    if world_size % num_workers or topology.devices_per_worker < num_devices:
        raise PlatformError(
            f"{requested}, for which the platform {name!r} has {num_workers} workers of {topology.devices_per_worker} "
            "devices each. That is a mistake of its topology(): update the platform, or choose sizes whose product is "
            f"{num_workers * topology.devices_per_worker}."
        )
    max_devices = platform.capabilities.devices_per_process
    if max_devices is not None and num_devices > max_devices:
        raise PlatformError(
            f"{requested}, and the topology() of the platform {name!r} has each worker drive {num_devices} devices, "
            f"but it claims at most {max_devices} (devices_per_process). That is a mistake of the platform: "
            f"tensor_parallel_size={max_devices} avoids it."
        )
    if parallel.tensor_parallel_size % num_devices:
        raise ConfigError(
            f"{requested}, and each worker of the platform {name!r} drives {num_devices} devices, which share layers: "
            f"it cannot hold several pipeline stages. Set tensor_parallel_size to a multiple of {num_devices} (with "
            f"pipeline_parallel_size {world_size // num_devices} or a divisor of that)."
        )
    workers = with_workers_as_ranks(parallel, num_devices)
    needs = (
        ("tensor_parallel_size", workers.tensor_parallel_size, ("all_reduce", "all_gather")),
        ("pipeline_parallel_size", workers.pipeline_parallel_size, ("send_recv",)),
    )
    for setting, size, collectives in needs:
        missing = [c for c in collectives if c not in platform.capabilities.collectives]
        if size > 1 and missing:
            raise ConfigError(
                f"{setting} is {getattr(parallel, setting)}, for which the platform {name!r} has {num_workers} workers "
                f"of {num_devices} device(s). They need {', '.join(missing)}, which it does not claim among its "
                f"collectives. Set {setting} to what one worker's devices can do, or choose another platform."
            )

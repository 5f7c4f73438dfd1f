"""Chooses and builds the executor of an engine."""

from __future__ import annotations

import functools
import importlib

from mvllm import plugin_groups
from mvllm.config.engine_config import EngineConfig
from mvllm.errors import ConfigError
from mvllm.executor.interface import Executor
from mvllm.executor.worker_topology import check_topology, launch_topology
from mvllm.installable import executor_packages
from mvllm.installation import install_command
from mvllm.logging import get_logger
from mvllm.platform.discovery import load_attribute
from mvllm.platform.interface import Platform
from mvllm.platform.phases import Phase, enter_phase
from mvllm.platform.topology import LaunchTopology
from mvllm.platform.worker_protocol import defined_together

logger = get_logger(__name__)

_BUILT_IN = {
    "uni": "mvllm.executor.uniproc:UniProcExecutor",
    "mp": "mvllm.executor.multiproc:MultiprocExecutor",
    "external_launcher": "mvllm.executor.external_launcher:ExecutorWithExternalLauncher",
}


def make_executor(config: EngineConfig, platform: Platform) -> Executor:
    """Builds the executor that the configuration names, or else the one that fits the number of workers.

    Raises:
        ConfigError: The executor is unknown, or the platform does not allow it, or it cannot run this many workers.
        PlatformError: The platform's topology has too few devices for this configuration.
    """
    topology = launch_topology(config, platform)
    with enter_phase(Phase.ENGINE):
        check_topology(config, platform, topology)
    name = config.parallel.distributed_executor_backend or _default(topology, config, platform)
    if name in _BUILT_IN:
        _check_allowed(name, topology, platform)
        if name == "uni" and topology.num_workers > 1:
            raise ConfigError(
                f"The executor 'uni' runs one worker; this configuration needs {topology.num_workers}. "
                "Set distributed_executor_backend to mp, or set tensor_parallel_size and pipeline_parallel_size to 1."
            )
        return _import(name, _BUILT_IN[name])(config, platform)
    source = plugin_groups.find(plugin_groups.EXECUTORS, name)
    if source is None:
        return _import(name, name)(config, platform)
    executor_class = _checked(name, plugin_groups.load(plugin_groups.EXECUTORS, source))
    if executor_class.needs_platform_support:
        _check_allowed(name, topology, platform)
    return executor_class(config, platform)


def known_executors() -> frozenset[str]:
    """Names of executors: of core, of allowed plugins, and of packages that mvllm lists, installed or not."""
    return frozenset({*_BUILT_IN, *executor_packages(), *plugin_groups.allowed_names(plugin_groups.EXECUTORS)})


def _check_allowed(name: str, topology: LaunchTopology, platform: Platform) -> None:
    if name not in topology.executors:
        raise ConfigError(
            f"distributed_executor_backend {name!r} was asked for, but the platform {platform.spec.name!r} "
            f"allows only {', '.join(topology.executors)} for this configuration. Set "
            "--distributed-executor-backend to one of them, or leave it out."
        )


def _default(topology: LaunchTopology, config: EngineConfig, platform: Platform) -> str:
    """`uni` for one worker; for several, an installed executor that prefers this engine, or else `mp`."""
    if topology.num_workers > 1 and (preferred := _preferred(topology, platform)) is not None:
        return preferred
    fitting = ("uni", "mp") if topology.num_workers == 1 else ("mp",)
    for name in fitting:
        if name in topology.executors:
            return name
    raise ConfigError(
        f"{topology.num_workers} workers are needed (tensor_parallel_size {config.parallel.tensor_parallel_size} × "
        f"pipeline_parallel_size {config.parallel.pipeline_parallel_size}), for which the platform allows "
        f"{', '.join(topology.executors)}. Name an executor that can with "
        "distributed_executor_backend, or set both sizes to 1."
    )


def _preferred(topology: LaunchTopology, platform: Platform) -> str | None:
    """The first installed executor that the platform lists and whose `is_preferred` is true."""
    listed = [name for name in topology.executors if name not in _BUILT_IN]
    if not listed:
        return None
    offered = plugin_groups.allowed_names(plugin_groups.EXECUTORS)
    for name in listed:
        if name in offered:
            try:
                _, found = plugin_groups.load_plugin_by_name(plugin_groups.EXECUTORS, name)
            except ConfigError as e:  # the user has not named it, so another executor will do
                logger.warning("The executor %r is not considered for this engine. %s", name, e)
                continue
            counted = functools.partial(_count_devices, platform)
            if _checked(name, found).is_preferred(topology, counted, platform=platform.spec.name):
                return name
    return None


def _count_devices(platform: Platform) -> int | None:
    """The number of devices that the platform finds on this machine; None where it does not list them."""
    with enter_phase(Phase.PROBE):
        found = load_attribute(platform.spec.probe)()
    return len(found.devices) or None


def can_sample_later(executor: Executor) -> bool:
    """Whether plans may set `masks_follow`: the executor and its workers support it."""
    return defined_together(type(executor), "execute_model", "sample_tokens") and executor.can_sample_later()


def _import(name: str, path: str) -> type[Executor]:
    """The class at a dotted path, `package.module.Class` or `package.module:Class`."""
    module, _, attribute = path.replace(":", ".").rpartition(".")
    try:
        return _checked(name, getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError, ValueError) as e:
        if package := executor_packages().get(name):
            raise ConfigError(
                f"distributed_executor_backend {name!r} was asked for, but the package that provides this executor is "
                f"not installed. Run: {install_command(package)}, on every machine that runs workers; or set "
                "distributed_executor_backend to mp to stay on this machine."
            ) from None
        known = sorted({*_BUILT_IN, *plugin_groups.allowed_names(plugin_groups.EXECUTORS)})
        path = f", and as a class it cannot be imported: {e}" if module else ""
        raise ConfigError(
            f"distributed_executor_backend is {name!r}, and there is no such executor{path}. There are "
            f"{', '.join(known)}, and classes by their dotted path (package.module.Class)."
        ) from e


def _checked(name: str, found: object) -> type[Executor]:
    if not (isinstance(found, type) and issubclass(found, Executor)):
        raise ConfigError(f"distributed_executor_backend {name!r} names {found!r}, which is not an Executor class.")
    return found

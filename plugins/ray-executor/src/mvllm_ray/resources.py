"""Ray's names of devices: the entry points `mvllm_ray.resources`, by the name of the platform.

    [project.entry-points."mvllm_ray.resources"]
    my_device = "my_package.ray:RESOURCE"

A platform's package declares one, whose object is the name of the resource that one of its devices is. This package has
those of mvllm's own platforms.
"""

from __future__ import annotations

import importlib.metadata

from mvllm.extension_api import ConfigError, LaunchTopology, get_logger

logger = get_logger("mvllm.ray.resources")

GROUP = "mvllm_ray.resources"
CPU, GPU = "CPU", "GPU"


def find_resource(platform: str, topology: LaunchTopology) -> str | None:
    """Ray's name of one device; None if nothing says it.

    Args:
        platform: The platform's name.
        topology: Its `ray_resource`, which is deprecated, is used without an entry point.

    Raises:
        ConfigError: The entry point cannot be loaded, or is not the name of a resource.
    """
    return _declared(platform) or topology.ray_resource


def require_resource(platform: str, topology: LaunchTopology) -> str:
    """As `find_resource`, for an engine that runs on Ray.

    Raises:
        ConfigError: As `find_resource`, or nothing says it.
    """
    if declared := _declared(platform):
        return declared
    if topology.ray_resource:
        logger.warning(
            "The platform %r names its Ray resource in LaunchTopology.ray_resource, which is deprecated. Its package "
            "should declare an entry point of %s.",
            platform,
            GROUP,
        )
        return topology.ray_resource
    raise ConfigError(
        f"distributed_executor_backend 'ray' was asked for, but no installed package says which of Ray's resources one "
        f"device of the platform {platform!r} is, by an entry point of {GROUP}. Declare one in the platform's package, "
        "or set distributed_executor_backend to mp."
    )


def _declared(platform: str) -> str | None:
    """The object of the platform's entry point. One of another package comes before this package's."""
    points = importlib.metadata.entry_points(group=GROUP, name=platform)
    if not points:
        return None
    point = min(points, key=lambda each: each.dist is not None and each.dist.name == "mvllm-ray")
    try:
        resource = point.load()
    except Exception as e:
        raise ConfigError(f"{_describe(point)} cannot be loaded: {type(e).__name__}: {e}") from e
    if not isinstance(resource, str) or not resource:
        raise ConfigError(f"{_describe(point)} must be the name of one of Ray's resources, found {resource!r}.")
    return resource


def _describe(point: importlib.metadata.EntryPoint) -> str:
    package = "an unknown package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
    return f"{point.value} of {package}, the entry point {point.name!r} of {GROUP},"

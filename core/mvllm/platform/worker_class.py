"""Which class is the worker of a platform."""

from __future__ import annotations

from mvllm import plugin_groups
from mvllm.errors import PlatformError
from mvllm.installable import missing_part
from mvllm.platform.checked_calls import call_checked
from mvllm.platform.interface import Platform

_DEFAULT = "mvllm.worker.worker:Worker"
_GRAPHS = "graph_compiler"
"""Capability, and name of the plugin with the worker of platforms that claim it."""


def worker_class_of(platform: Platform) -> str:
    """`package.module:Class` of a platform's worker. Imports nothing.

        worker_class()                     the class that the platform names, see `own_worker_class`
        capabilities.graph_compiler        that of the plugin `graph_compiler` in the group `mvllm.workers`
        else                               core's

    Raises:
        PlatformError: The platform needs a worker that it does not name, or that no installed package has.
    """
    return own_worker_class(platform) or default_worker_class(platform)


def own_worker_class(platform: Platform) -> str | None:
    """The class that a platform names; None if it leaves the choice to the engine.

    A platform with `graph_compiler` that names core's `Worker` leaves it, too: that class does not trace models.
    """
    path: str | None = call_checked(platform, "worker_class", returns=(str, type(None)))
    return None if path == _DEFAULT and platform.capabilities.graph_compiler else path


def default_worker_class(platform: Platform) -> str:
    """As `worker_class_of`, for a platform that names no class."""
    name = platform.spec.name
    if not platform.capabilities.torch_device:
        raise PlatformError(
            f"The platform {name!r} has no torch device, so it needs its own worker class, but its worker_class() "
            "returns None."
        )
    if not platform.capabilities.graph_compiler:
        return _DEFAULT
    source = plugin_groups.find(plugin_groups.WORKERS, _GRAPHS)
    if source is None:
        what = f"The platform {name!r}, which runs models as graphs,"
        raise PlatformError(missing_part("graph", what) or f"{what} needs the package mvllm-graph.")
    return source.entry_point

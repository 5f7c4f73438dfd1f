"""For packages that report on an installation: versions, platforms, plugins, and packages that may be installed.

`install_command` is for the error of a package that lacks a library: no message names `pip` by itself.
"""

from __future__ import annotations

from mvllm.entrypoints.cli.platforms import availability as availability
from mvllm.entrypoints.cli.platforms import availability_reason as availability_reason
from mvllm.entrypoints.cli.platforms import installed_plugins as installed_plugins
from mvllm.installable import describe_parts as describe_parts
from mvllm.installable import installable_executors as installable_executors
from mvllm.installable import installable_platforms as installable_platforms
from mvllm.installation import install_command as install_command
from mvllm.installation import is_own as is_own
from mvllm.installation import uninstall_command as uninstall_command
from mvllm.platform.discovery import discover as discover
from mvllm.platform.discovery import dotted as dotted
from mvllm.platform.discovery import find_sources as find_sources
from mvllm.platform.spec import CONTRACT as CONTRACT
from mvllm.plugin_groups import ENVIRONMENT_VARIABLE as ALLOW_LIST_VARIABLE
from mvllm.plugin_groups import EXECUTORS as _EXECUTORS
from mvllm.plugin_groups import allowed_names as _allowed_names
from mvllm.plugin_groups import is_allowed as is_allowed
from mvllm.version import __version__ as __version__

__all__ = [
    "ALLOW_LIST_VARIABLE",
    "CONTRACT",
    "__version__",
    "availability",
    "availability_reason",
    "describe_parts",
    "discover",
    "dotted",
    "executor_names",
    "find_sources",
    "install_command",
    "installable_executors",
    "installable_platforms",
    "installed_plugins",
    "is_allowed",
    "is_own",
    "uninstall_command",
]


def executor_names() -> tuple[str, ...]:
    """Names of the allowed executors of other packages, sorted. Imports none of them."""
    return _allowed_names(_EXECUTORS)

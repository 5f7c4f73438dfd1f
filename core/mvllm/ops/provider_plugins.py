"""Op providers of packages other than the platform: entry points of `mvllm.op_providers`, selected by name.

The entry point names a function without arguments that returns a sequence of OpProvider, called in each worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mvllm import plugin_groups
from mvllm.errors import ConfigError
from mvllm.platform.op_provider import OpProvider


def check_providers(names: Iterable[str]) -> None:
    """Checks the names before workers start. Imports nothing.

    Raises:
        ConfigError: A set is not installed or not allowed.
    """
    for name in names:
        if plugin_groups.find(plugin_groups.OP_PROVIDERS, name) is None:
            raise ConfigError(
                f"op_providers names {name!r}, which no installed package offers. "
                f"There are: {', '.join(plugin_groups.allowed_names(plugin_groups.OP_PROVIDERS)) or 'none'}."
            )


def installed_providers(names: Iterable[str]) -> list[OpProvider]:
    """The providers of the named sets, in that order. Phase: worker.

    Raises:
        ConfigError: A set is not installed, not allowed, or cannot be loaded; names the package.
    """
    found: list[OpProvider] = []
    for name in names:
        source, factory = plugin_groups.load_plugin_by_name(plugin_groups.OP_PROVIDERS, name)
        try:
            providers = factory()
        except KeyboardInterrupt:
            raise
        except BaseException as e:  # a plugin may raise anything, SystemExit included
            raise ConfigError(f"The op providers of {source} cannot be loaded: {type(e).__name__}: {e}") from e
        if not isinstance(providers, Sequence) or not all(isinstance(p, OpProvider) for p in providers):
            raise ConfigError(f"{source} must name a function that returns OpProviders, got {providers!r}.")
        found += providers
    return found

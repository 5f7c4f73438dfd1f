"""Finds the HTTP plugins whose routes are at the root of the server (`HTTPPlugin`), and the parts that are missing.

    mvllm.http      compat  = mvllm_compat.plugin                 a module: its PLUGIN is used unless it is disabled
    mvllm.http      answers = mvllm_example_http:make_router      an object: used if --http-plugins names it

The value of the entry point tells the two apart, so that a plugin of the second kind is imported only when it is named.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from mvllm import plugin_groups
from mvllm.entrypoints.http_plugin import HTTPPlugin
from mvllm.errors import ConfigError
from mvllm.installable import installable_parts, missing_part
from mvllm.logging import get_logger
from mvllm.plugin_groups import PluginSource

if TYPE_CHECKING:
    from mvllm.entrypoints.openai.common.api_format import APIFormat
    from mvllm.entrypoints.openai.server.settings import ServerSettings

logger = get_logger(__name__)


@dataclass(frozen=True)
class RootPlugin:
    """A plugin whose routes are at the root of the server.

    Attributes:
        source: The package that has it.
        plugin: The module's `PLUGIN`; None if it cannot be loaded.
        error: Why; None if it is loaded.
    """

    source: PluginSource
    plugin: HTTPPlugin | None
    error: Exception | None = None

    @property
    def name(self) -> str:
        return self.source.name


@dataclass(frozen=True)
class Part:
    """What a package of mvllm's own adds to the server, to name the package where it is missing.

    Attributes:
        name: The name of the extra.
        paths: Beginnings of its paths.
        options: Its options of `mvllm serve`.
        plugin: The plugin's name; empty for that of the extra.
    """

    name: str
    paths: tuple[str, ...]
    options: tuple[str, ...] = ()
    plugin: str = ""


PARTS = (
    Part("compat", ("/api/", "/v1/messages")),
    Part("image-generation", ("/v1/images/",), plugin="images"),
    Part(
        "responses",
        ("/v1/responses", "/v1/conversations", "/v1/chat/completions/"),
        (
            *("--responses-store", "--max-stored-responses", "--max-stored-bytes", "--max-stored-age"),
            *("--mcp-server", "--mcp-request-urls", "--mcp-max-calls", "--mcp-start-timeout", "--mcp-timeout"),
            "--mcp-max-result-bytes",
        ),
    ),
)


def is_root_plugin(source: PluginSource) -> bool:
    """Whether the plugin's routes are at the root: its entry point names a module."""
    return ":" not in source.entry_point


def root_plugins(disabled: Sequence[str] = (), required: Sequence[str] = ()) -> list[RootPlugin]:
    """The plugins whose routes are at the root, sorted by name. Imports their modules.

    Args:
        disabled: Names of those that are not used.
        required: Names of those without which the server must not start.

    Raises:
        ConfigError: One of `required` cannot be loaded, or two packages have the same name.
    """
    sources = tuple(s for s in plugin_groups.list_plugins(plugin_groups.HTTP) if plugin_groups.is_allowed(s))
    found = [each for each in _load_all(sources, tuple(sys.path)) if each.name not in disabled]
    for each in found:
        if each.error is not None and each.name in required:
            raise each.error
    return found


def loaded_plugins(disabled: Sequence[str] = ()) -> list[tuple[RootPlugin, HTTPPlugin]]:
    """Those of `root_plugins` that could be loaded."""
    return [(each, each.plugin) for each in root_plugins(disabled) if each.plugin is not None]


def api_formats(disabled: Sequence[str] = ()) -> list[APIFormat]:
    """The formats of APIs other than OpenAI's, of all plugins that are installed and not disabled."""
    return [each for _, plugin in loaded_plugins(disabled) for each in plugin.formats()]


def log_failures(plugins: Sequence[RootPlugin]) -> None:
    """Logs the plugins that could not be loaded. The server runs without them."""
    for each in plugins:
        if each.error is not None:
            logger.error("The server runs without the HTTP plugin %s: %s", each.name, each.error, exc_info=each.error)


@functools.cache
def _load_all(sources: tuple[PluginSource, ...], path: tuple[str, ...]) -> tuple[RootPlugin, ...]:
    """The plugins of these packages.

    Args:
        sources: The allowed HTTP plugins.
        path: The module search path, on which packages of equal names may be others.
    """
    names = dict.fromkeys(source.name for source in sources if is_root_plugin(source))
    return tuple(_load(plugin_groups.require(plugin_groups.HTTP, name)) for name in names)


def _load(source: PluginSource) -> RootPlugin:
    try:
        module = plugin_groups.load(plugin_groups.HTTP, source)
        plugin = getattr(module, "PLUGIN", None)
        if not isinstance(plugin, HTTPPlugin):
            raise ConfigError(
                f"{source} must name a module whose PLUGIN is an HTTPPlugin, found {type(plugin).__name__}."
            )
    except ConfigError as e:
        return RootPlugin(source, None, e)
    return RootPlugin(source, plugin)


# --- options and settings


def add_plugin_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the plugins to `mvllm serve`, and those of missing parts, which are errors that say so.

    Raises:
        ConfigError: A plugin has an option that the command has.
    """
    for each, plugin in loaded_plugins():
        try:
            plugin.add_serve_arguments(parser)
        except argparse.ArgumentError as e:
            raise ConfigError(
                f"The HTTP plugin {each.source} adds an option that `mvllm serve` has: {e}. Uninstall it, or leave it "
                f"out of {plugin_groups.ENVIRONMENT_VARIABLE}."
            ) from e
    known = parser._option_string_actions
    for part in PARTS:
        for option in part.options:
            if option not in known:
                parser.add_argument(option, nargs="?", action=_MissingOption, help=argparse.SUPPRESS, const=part.name)


def plugin_settings(args: argparse.Namespace, disabled: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The settings of each plugin, as plain values.

    Raises:
        ConfigError: They are not valid.
    """
    made = {each.name: plugin.serve_settings(args) for each, plugin in loaded_plugins(disabled)}
    return {name: msgspec.to_builtins(settings) for name, settings in made.items() if settings is not None}


def model_options() -> frozenset[str]:
    """The options of plugins that each model of `--models` may set."""
    return frozenset().union(*(plugin.model_options for _, plugin in loaded_plugins()))


@contextlib.contextmanager
def hold_plugins(settings: ServerSettings) -> Iterator[None]:
    """Holds what the processes of a server share, while it runs.

    Raises:
        ConfigError: A plugin cannot run with its settings.
    """
    with contextlib.ExitStack() as stack:
        for _, plugin in loaded_plugins(settings.disabled_http_plugins):
            stack.enter_context(plugin.running(settings))
        yield


class _MissingOption(argparse.Action):
    """An option of a part that is not installed, or not allowed."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        name = str(self.const)
        plugin_groups.find(plugin_groups.HTTP, name)  # raises if it is installed, and not allowed
        message = missing_part(name, f"`{parser.prog} {option_string}`")
        raise ConfigError(message or f"The HTTP plugin {name!r} has no option {option_string}.")


def missing_part_of(path: str) -> str | None:
    """An error's text for a path of a part that is not installed; None for other paths."""
    installed = {source.name for source in plugin_groups.list_plugins(plugin_groups.HTTP)}
    for part in PARTS:
        is_its_path = path.startswith(tuple(f"{p.rstrip('/')}/" for p in part.paths)) or path in part.paths
        if is_its_path and (part.plugin or part.name) not in installed:
            package = installable_parts().get(part.name)  # a client cannot install it, so there is no command
            return package and f"This path needs the package {package}, which is not installed on this server."
    return None

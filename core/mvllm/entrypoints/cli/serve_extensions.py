"""Additions of other packages to `mvllm serve`: options, and servers that take the run over when theirs are given.

    mvllm.serve     router = "mvllm_router.serve_models"        a module, see ServeExtension

`mvllm serve` imports the modules of all allowed packages with such an entry point, for its help too. So a module
imports little more than this one until its server is made.
"""

from __future__ import annotations

import argparse
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from mvllm import plugin_groups
from mvllm.config.engine_args import EngineArgs
from mvllm.entrypoints.openai.server.settings import ServerSettings
from mvllm.errors import ConfigError

Serve = Callable[[socket.socket], int]
"""Serves on a listening socket, which the caller closes, until a signal ends the server; returns the exit status."""

OPTIONS_OF_PARTS = {"--models": "router", "--models-dir": "router"}
"""Options that parts of mvllm add, by the part: without its package the option is an error that names the package."""


@dataclass(frozen=True)
class ServeCommand:
    """A run of `mvllm serve`, as extensions see it.

    Attributes:
        args: The parsed command line.
        settings: The settings of the server, without those of its model.
        add_arguments: Adds all options of `mvllm serve` to a parser.
        model_settings: The engine's arguments that parsed options make, and the given settings with those that the
            options make of the model's server. Raises ConfigError if they are invalid.
    """

    args: argparse.Namespace
    settings: ServerSettings
    add_arguments: Callable[[argparse.ArgumentParser], None]
    model_settings: Callable[[argparse.Namespace, ServerSettings], tuple[EngineArgs, ServerSettings]]


class ServeExtension(Protocol):
    """A module of the entry point group `mvllm.serve`."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds options to `mvllm serve`."""

    def make_server(self, command: ServeCommand) -> Serve | None:
        """What serves instead of the server of one model, if the options ask for it; else None.

        Raises:
            ConfigError: The options are invalid.
        """


def load_extensions() -> list[ServeExtension]:
    """The extensions of all allowed packages, by name.

    Raises:
        ConfigError: One cannot be loaded; names its package.
    """
    return [_load(name) for name in plugin_groups.allowed_names(plugin_groups.SERVE)]


def add_extension_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of all extensions, and for those of parts that are not installed an error.

    Raises:
        ConfigError: An extension cannot be loaded.
    """
    for extension in load_extensions():
        extension.add_arguments(parser)
    for option, part in OPTIONS_OF_PARTS.items():
        if option not in parser._option_string_actions:
            parser.add_argument(option, action=_MissingPart, part=part, help=argparse.SUPPRESS)


def _load(name: str) -> ServeExtension:
    source, module = plugin_groups.load_plugin_by_name(plugin_groups.SERVE, name)
    if not all(callable(getattr(module, function, None)) for function in ("add_arguments", "make_server")):
        raise ConfigError(
            f"{source} must name a module with add_arguments(parser) and make_server(command), found {module!r}."
        )
    return cast(ServeExtension, module)


class _MissingPart(argparse.Action):
    """An option of a part that is not installed, or that MVLLM_PLUGINS does not allow."""

    def __init__(self, *, part: str, **options: Any) -> None:
        super().__init__(**options)
        self._part = part

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        from mvllm.installable import missing_part

        plugin_groups.find(plugin_groups.SERVE, self._part)  # raises if it is installed and not allowed
        what = f"`{parser.prog} {self.option_strings[0]}`"
        raise ConfigError(missing_part(self._part, what) or f"{what} needs a package that has the part {self._part!r}.")

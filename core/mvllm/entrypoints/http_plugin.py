"""The class of HTTP plugins whose routes are at the root of the server. Importing it loads no web framework."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from mvllm.entrypoints.openai.common.api_format import APIFormat
    from mvllm.entrypoints.openai.server.server_handle import APIServerHandle, HTTPRoutes
    from mvllm.entrypoints.openai.server.settings import ServerSettings


class HTTPPlugin:
    """An API beside core's: its routes, the options of `mvllm serve` that belong to them, and its format of errors.

    An entry point of the group `mvllm.http` that names a module, without an object, has such a plugin: the module's
    `PLUGIN`. It is used by default, unless the server is started with `--disable-http-plugins NAME`. The module is
    imported whenever `mvllm serve` starts, so it imports what routes need only when they are made.

    Attributes:
        tags: Tags of its routes that core does not have, with their descriptions.
        operations: Paths whose requests have spans, with the operation's name in OpenTelemetry's conventions.
        root_text: The first line of what `GET /` answers to programs, before core's; None for core's alone.
        model_options: Those of its options, such as `max_stored_bytes`, that each model of `--models` may set.
    """

    tags: Mapping[str, str] = MappingProxyType({})
    operations: Mapping[str, str] = MappingProxyType({})
    root_text: str | None = None
    model_options: frozenset[str] = frozenset()

    def add_serve_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the plugin's options to `mvllm serve`."""

    def serve_settings(self, args: argparse.Namespace) -> msgspec.Struct | None:
        """The settings of the options, for `APIServerHandle.settings`; None for none.

        All fields of the struct have defaults, which apply where a server is started without a command line. It is
        sent to each API server as plain values.

        Args:
            args: The parsed command line, with core's options, too.

        Raises:
            ConfigError: They are not valid.
        """
        return None

    def formats(self) -> Sequence[APIFormat]:
        """The formats of errors and models of its APIs."""
        return ()

    def running(self, settings: ServerSettings) -> AbstractContextManager[None]:
        """Holds what the processes of one server share, such as a lock, in the process that starts the others.

        Args:
            settings: The server's; `settings.of_plugin` has the plugin's own.

        Raises:
            ConfigError: The server cannot be started with these settings.
        """
        return contextlib.nullcontext()

    def routes(self, server: APIServerHandle) -> HTTPRoutes:
        """Its routes, under their whole paths. Called once in each API server, before the model is loaded.

        Raises:
            ConfigError: The server cannot be started with these settings.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define routes(server)")

    # --- several models behind one server (`--models`)

    def check_model(self, settings: ServerSettings, name: str, model: ServerSettings) -> None:
        """Checks the settings of one of several models.

        Args:
            settings: The server's.
            name: The model's.
            model: The settings of the model's own server, which have its values of `model_options`.

        Raises:
            ConfigError: They contradict the server's.
        """

    def needs_model(self, settings: ServerSettings, method: str, path: str) -> bool:
        """Whether a request has to be answered by the server of its model; if not, the router answers it."""
        return True

    def model_ended(self, settings: ServerSettings, names: Collection[str]) -> None:
        """Called when the process of a model has ended, on a thread.

        Args:
            settings: The server's.
            names: The names of the model and of its adapters.
        """

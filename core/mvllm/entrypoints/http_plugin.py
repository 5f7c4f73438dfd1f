"""The class of HTTP plugins whose routes are at the root of the server. Importing it loads no web framework."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from fastapi import APIRouter

    from mvllm.entrypoints.openai.common.api_format import APIFormat
    from mvllm.entrypoints.openai.server.root_routes import APIServerHandle


class HTTPPlugin:
    """An API beside core's: its routes, the options of `mvllm serve` that belong to them, and its format of errors.

    An entry point of the group `mvllm.http` that names a module, without an object, has such a plugin: the module's
    `PLUGIN`. It is used by default, unless the server is started with `--disable-http-plugins NAME`. The module is
    imported whenever `mvllm serve` starts, so it imports what routes need only when they are made.

    Attributes:
        tags: Tags of its routes that core does not have, with their descriptions.
        operations: Paths whose requests have spans, with the operation's name in OpenTelemetry's conventions.
        root_text: What `GET /` answers to programs; None for core's text.
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

    def routers(self, server: APIServerHandle) -> Sequence[APIRouter]:
        """Its routes, under their whole paths. Called once in each API server, before the model is loaded.

        Raises:
            ConfigError: The server cannot be started with these settings.
        """
        raise NotImplementedError

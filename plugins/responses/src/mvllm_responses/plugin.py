"""The entry point of the group `mvllm.http`: `/v1/responses`, conversations and stored chat completions."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import TYPE_CHECKING

from mvllm.extension_api import ConfigError
from mvllm.extension_api.http_plugin import HTTPPlugin
from mvllm_responses.arguments import add_responses_arguments, responses_settings
from mvllm_responses.settings import NAME, ResponsesSettings

if TYPE_CHECKING:
    from mvllm.extension_api.http import APIServerHandle, HTTPRoutes, ServerSettings


class Responses(HTTPPlugin):
    """OpenAI's Responses API, and what the server stores."""

    operations = MappingProxyType({"/v1/responses": "chat"})
    model_options = frozenset(("max_stored_responses", "max_stored_bytes", "max_stored_age"))

    def add_serve_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The options for the store and for tool servers."""
        add_responses_arguments(parser)

    def serve_settings(self, args: argparse.Namespace) -> ResponsesSettings:
        """The settings of these options."""
        return responses_settings(args)

    def running(self, settings: ServerSettings) -> AbstractContextManager[None]:
        """Holds the file of the store."""
        from mvllm_responses.store_file import hold_store_file, store_limits

        own = settings.of_plugin(NAME, ResponsesSettings)
        return hold_store_file(own.responses_store, store_limits(settings, own))

    def routes(self, server: APIServerHandle) -> HTTPRoutes:
        """All routes."""
        from mvllm.extension_api.http import APIRouter, HTTPRoutes
        from mvllm_responses.routes import ResponsesRoutes

        router = APIRouter(tags=["generation"])
        responses = ResponsesRoutes(server)
        responses.add_to(router)
        server.add_closer(responses.close)
        return HTTPRoutes([router], responses.store_completion)

    # --- several models behind one server

    def check_model(self, settings: ServerSettings, name: str, model: ServerSettings) -> None:
        """Checks that a model has no limits of its own for stored responses that all models share."""
        of_server, of_model = (each.of_plugin(NAME, ResponsesSettings) for each in (settings, model))
        if of_server.responses_store is None:  # each model has a store of its own, in memory
            return
        for field in ("max_stored_responses", "max_stored_bytes", "max_stored_seconds"):
            if getattr(of_model, field) != getattr(of_server, field):
                option = "max-stored-age" if field == "max_stored_seconds" else field.replace("_", "-")
                raise ConfigError(
                    f"{name}: {option} is given for one model, but with --responses-store all models share their "
                    f"stored responses. Give it on the command line, as --{option}."
                )

    def needs_model(self, settings: ServerSettings, method: str, path: str) -> bool:
        """False for objects in a file that all models share."""
        if settings.of_plugin(NAME, ResponsesSettings).responses_store is None:
            return True
        return not is_about_stored_objects(method, path)

    def model_ended(self, settings: ServerSettings, names: Collection[str]) -> None:
        """Ends the stored responses that the model has not finished."""
        from mvllm_responses.store_file import end_interrupted, store_limits

        own = settings.of_plugin(NAME, ResponsesSettings)
        if own.responses_store is not None:
            end_interrupted(own.responses_store, store_limits(settings, own), names)


def is_about_stored_objects(method: str, path: str) -> bool:
    """Whether a request reads or changes stored objects, and runs no model."""
    if path.startswith("/v1/responses/"):
        return path not in ("/v1/responses/input_tokens", "/v1/responses/compact")
    if path == "/v1/chat/completions":
        return method == "GET"
    return path.startswith(("/v1/chat/completions/", "/v1/conversations/")) or path == "/v1/conversations"


PLUGIN = Responses()

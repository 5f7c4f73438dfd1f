"""What the server gives to its routes and to HTTP plugins with routes at the root, and what these give it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from starlette.routing import Router

from mvllm.engine.async_llm import AsyncLLM
from mvllm.entrypoints.openai.chat_completions import StoreCompletion
from mvllm.entrypoints.openai.common.serving_context import ServingContext
from mvllm.entrypoints.openai.common.serving_models import OpenAIServingModels
from mvllm.entrypoints.openai.server.body_routes import BodyRoutes
from mvllm.entrypoints.openai.server.server_state import ServerState
from mvllm.entrypoints.openai.server.settings import ServerSettings

T = TypeVar("T", bound=msgspec.Struct)


class APIServerHandle:
    """The access of routes at the root, core's and plugins', to one API server.

    Args:
        name: The plugin's name; empty for core.

    Attributes:
        state: The server's state.
        body_routes: Adds routes with a JSON body, and runs their handlers.
        models: The names of the model and of its LoRA adapters.
        server_settings: The settings of the server.
    """

    def __init__(
        self,
        name: str,
        state: ServerState,
        models: OpenAIServingModels,
        server_settings: ServerSettings,
        body_routes: BodyRoutes,
    ) -> None:
        self._name = name
        self.state = state
        self.models = models
        self.server_settings = server_settings
        self.body_routes = body_routes

    def for_plugin(self, name: str) -> APIServerHandle:
        """The handle of a plugin."""
        return APIServerHandle(name, self.state, self.models, self.server_settings, self.body_routes)

    @property
    def context(self) -> ServingContext:
        """What handlers of requests get.

        Raises:
            APIError: The server does not accept requests (503).
        """
        return self.state.context

    @property
    def loaded_engine(self) -> AsyncLLM | None:
        """The engine, or None while it is being loaded."""
        return self.state.loaded_engine

    def settings(self, kind: type[T]) -> T:
        """The plugin's settings, as `HTTPPlugin.serve_settings` has made them.

        Args:
            kind: Their struct. Without settings, its fields have their defaults.
        """
        return self.server_settings.of_plugin(self._name, kind)

    def add_closer(self, close: Callable[[], Awaitable[None]]) -> None:
        """Adds what ends something that routes use; it is called after the last response."""
        self.state.add_closer(close)


@dataclass(frozen=True)
class HTTPRoutes:
    """What a plugin adds to an API server.

    Attributes:
        routers: Its routes, under their whole paths: core's APIRouter, Starlette's Router, or FastAPI's APIRouter. No
            router includes another.
        store_completion: Stores chat completions of requests with `store: true`; None if it stores none. One plugin may
            have it.
    """

    routers: Sequence[Router]
    store_completion: StoreCompletion | None = None

"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`: an administrator changes which adapters are offered.

An adapter is offered as a model: its name stands in `/v1/models`, and requests name it.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mvllm.engine.async_llm import AsyncLLM
from mvllm.entrypoints.openai.common.errors import APIError
from mvllm.entrypoints.openai.common.openapi import request_body_schema
from mvllm.entrypoints.openai.common.request_body import BodyDecoder, BodyReader
from mvllm.entrypoints.openai.common.server_sent_events import encode_json
from mvllm.entrypoints.openai.common.serving_models import OpenAIServingModels
from mvllm.entrypoints.openai.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from mvllm.entrypoints.openai.server.middleware import require_admin
from mvllm.entrypoints.openai.server.server_state import ServerState
from mvllm.entrypoints.openai.server.settings import ServerSettings
from mvllm.errors import ConfigError, RequestError


class LoRARoutes:
    """The two routes.

    Args:
        state: Where the server is in its life.
        models: The names it answers to.
        settings: The server's.
        bodies: Reads bodies.
    """

    def __init__(
        self, state: ServerState, models: OpenAIServingModels, settings: ServerSettings, bodies: BodyReader
    ) -> None:
        self._state = state
        self._models = models
        self._settings = settings
        self._bodies = bodies
        self._loads = BodyDecoder(LoadLoRAAdapterRequest)
        self._unloads = BodyDecoder(UnloadLoRAAdapterRequest)

    def add_routes(self, router: APIRouter) -> None:
        """Adds the routes."""
        for path, endpoint, kind, summary in (
            ("/v1/load_lora_adapter", self.load, LoadLoRAAdapterRequest, "Offer an adapter."),
            ("/v1/unload_lora_adapter", self.unload, UnloadLoRAAdapterRequest, "Offer it no more."),
        ):
            router.add_api_route(
                path, endpoint, methods=["POST"], summary=summary, openapi_extra=request_body_schema(kind)
            )

    async def load(self, request: Request) -> Response:
        """Loads an adapter, and offers it under a name."""
        engine = self._engine(request)
        asked = await self._bodies.decode(request, self._loads)
        name, path = _required(asked.lora_name, "lora_name"), _required(asked.lora_path, "lora_path")
        await self._models.load_lora_adapter(engine, name, path)
        return _json({"id": name, "object": "model", "root": path, "parent": self._models.name})

    async def unload(self, request: Request) -> Response:
        """Offers an adapter no more; requests under way go on."""
        engine = self._engine(request)
        asked = await self._bodies.decode(request, self._unloads)
        name = _required(asked.lora_name, "lora_name")
        await self._models.unload_lora_adapter(engine, name)
        return _json({"id": name, "object": "model", "deleted": True})

    def _engine(self, request: Request) -> AsyncLLM:
        require_admin(request)
        if not self._settings.runtime_lora_loading:
            raise APIError(
                400,
                "Each of several API servers would know only its own adapters: name them at the start "
                "(--lora-modules), or run with --api-server-count 1.",
                code="adapters_are_fixed",
            )
        return self._state.engine


async def load_static_loras(engine: AsyncLLM, models: OpenAIServingModels, settings: ServerSettings) -> None:
    """Loads the adapters that the settings name.

    Raises:
        ConfigError: One cannot be used.
    """
    for name, path in settings.lora_modules:
        try:
            await models.load_lora_adapter(engine, name, path)
        except (APIError, RequestError) as e:
            raise ConfigError(f"--lora-modules {name}={path}: {e}") from e


def _required(value: str | None, name: str) -> str:
    if not value:
        raise RequestError(f"{name} is missing.", parameter=name)
    return value


def _json(value: dict[str, object]) -> Response:
    return Response(encode_json(value), media_type="application/json")

"""Routes of administration, which need an administrator's key: sleep, prefix cache, LoRA adapters, server info."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mvllm.engine.async_llm import AsyncLLM
from mvllm.entrypoints.openai.common.api_router import APIRouter
from mvllm.entrypoints.openai.common.errors import APIError
from mvllm.entrypoints.openai.common.json_response import json_response
from mvllm.entrypoints.openai.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from mvllm.entrypoints.openai.server.middleware import require_admin
from mvllm.entrypoints.openai.server.server_handle import APIServerHandle
from mvllm.entrypoints.root_plugins import loaded_plugins
from mvllm.errors import ConfigError, ModelError, PlatformError, RequestError
from mvllm.version import __version__


class SleepQuery(msgspec.Struct):
    """Query of `/sleep`."""

    level: int = 1


class WakeUpQuery(msgspec.Struct):
    """Query of `/wake_up`."""

    tags: list[str] | None = None


class AdminRoutes:
    """The routes.

    Args:
        server: The API server.
    """

    def __init__(self, server: APIServerHandle) -> None:
        self._server = server

    def add_to(self, router: APIRouter) -> None:
        """Adds the routes to a router."""
        add, add_body = router.add_api_route, self._server.body_routes.add
        add("/reset_prefix_cache", self.reset_prefix_cache, methods=["POST"], summary="Clear the prefix cache.")
        add("/reset_mm_cache", self.reset_mm_cache, methods=["POST"], summary="Clear the caches of images and others.")
        summary = "Free device memory and accept no requests."
        add("/sleep", self.sleep, methods=["POST"], summary=summary, query=SleepQuery)
        summary = "Allocate the memory and accept requests again."
        add("/wake_up", self.wake_up, methods=["POST"], summary=summary, query=WakeUpQuery)
        add("/is_sleeping", self.is_sleeping, methods=["GET"], summary="Whether the engine sleeps.")
        add_body(router, "/v1/load_lora_adapter", LoadLoRAAdapterRequest, self.load, "Load a LoRA adapter.")
        add_body(router, "/v1/unload_lora_adapter", UnloadLoRAAdapterRequest, self.unload, "Unload a LoRA adapter.")
        add("/server_info", self.server_info, methods=["GET"], summary="Version, model and platform.")

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Clears the prefix cache; `reset` is false if running requests use cached blocks."""
        require_admin(request)
        self._server.body_routes.reader.check_query(request)
        return json_response({"reset": await self._server.state.engine.reset_prefix_cache()})

    async def reset_mm_cache(self, request: Request) -> Response:
        """Drops prepared items, and results of encoders; `reset` is false if running requests use some."""
        require_admin(request)
        self._server.body_routes.reader.check_query(request)
        return json_response({"reset": await self._server.state.engine.reset_mm_cache()})

    async def sleep(self, request: Request) -> Response:
        """Aborts running requests and puts the engine to sleep."""
        require_admin(request)
        query = self._server.body_routes.reader.read_query(request, SleepQuery)
        engine = self._server.state.engine
        with _show_errors("sleep_failed"):
            await engine.sleep(query.level)
        return json_response({"is_sleeping": engine.is_asleep})

    async def wake_up(self, request: Request) -> Response:
        """Wakes the engine up; with `tags`, allocates only `weights` or `kv_cache`."""
        require_admin(request)
        query = self._server.body_routes.reader.read_query(request, WakeUpQuery)
        engine = self._server.state.engine
        with _show_errors("wake_up_failed"):
            await engine.wake_up(query.tags)
        return json_response({"is_sleeping": engine.is_asleep})

    async def is_sleeping(self, request: Request) -> Response:
        """Whether the engine sleeps."""
        require_admin(request)
        return json_response({"is_sleeping": self._server.state.engine.is_asleep})

    async def load(self, request: Request) -> Response:
        """Loads a LoRA adapter. Requests may then name it as their model."""
        engine = self._engine_for_lora(request)
        body = await self._server.body_routes.decode(request, LoadLoRAAdapterRequest)
        name, path = _required(body.lora_name, "lora_name"), _required(body.lora_path, "lora_path")
        await self._server.models.load_lora_adapter(engine, name, path)
        return json_response({"id": name, "object": "model", "root": path, "parent": self._server.models.name})

    async def unload(self, request: Request) -> Response:
        """Unloads a LoRA adapter. Its running requests continue."""
        engine = self._engine_for_lora(request)
        body = await self._server.body_routes.decode(request, UnloadLoRAAdapterRequest)
        name = _required(body.lora_name, "lora_name")
        await self._server.models.unload_lora_adapter(engine, name)
        return json_response({"id": name, "object": "model", "deleted": True})

    async def server_info(self, request: Request) -> Response:
        """Version, phase, plugins, platform, workers of all replicas, and model."""
        require_admin(request)
        engine = self._server.state.loaded_engine
        used = [each.name for each, _ in loaded_plugins(self._server.server_settings.disabled_http_plugins)]
        info: dict[str, Any] = {
            "version": __version__,
            "phase": self._server.state.phase.value,
            "http_plugins": sorted({*self._server.server_settings.http_plugins, *used}),
            "platform": None if engine is None else engine.platform_summary,
            "num_workers": None,
            "model": None,
        }
        if engine is not None:
            model = engine.model_config
            info["num_workers"] = engine.num_workers
            fields = ("model", "architecture", "dtype", "max_model_len", "quantization", "logprobs_mode")
            info["model"] = {field: getattr(model, field) for field in fields}
        return json_response(info)

    def _engine_for_lora(self, request: Request) -> AsyncLLM:
        require_admin(request)
        if not self._server.server_settings.runtime_lora_loading:
            raise APIError(
                400,
                "Each of several API servers would know only its own adapters: name them at the start "
                "(--lora-modules), or run with --api-server-count 1.",
                code="adapters_are_fixed",
            )
        return self._server.state.engine


@contextmanager
def _show_errors(code: str) -> Iterator[None]:
    """Returns errors of the configuration, the model and the platform to the client; otherwise they are only logged."""
    try:
        yield
    except (ConfigError, ModelError, PlatformError) as e:
        raise APIError(503, str(e), code=code, retry_after=1) from e


def _required(value: str | None, name: str) -> str:
    if not value:
        raise RequestError(f"{name} is missing.", parameter=name)
    return value

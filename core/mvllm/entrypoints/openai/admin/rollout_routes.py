"""Routes for reinforcement learning, which need an administrator's key: pause, weight updates, calls of the workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mvllm.engine.async_llm import AsyncLLM
from mvllm.entrypoints.openai.common.api_router import APIRouter
from mvllm.entrypoints.openai.common.errors import APIError
from mvllm.entrypoints.openai.common.json_response import json_response
from mvllm.entrypoints.openai.protocol import (
    CollectiveRpcRequest,
    FinishWeightUpdateRequest,
    InitWeightTransferRequest,
    UpdateLoRAAdapterRequest,
    UpdateWeightsRequest,
)
from mvllm.entrypoints.openai.server.middleware import require_admin
from mvllm.entrypoints.openai.server.server_handle import APIServerHandle
from mvllm.errors import ConfigError, ModelError, PlatformError, RequestError, UnsupportedMethodError


class PauseQuery(msgspec.Struct):
    """Query of `/pause`."""

    mode: str = "abort"
    clear_cache: bool = True


class RolloutRoutes:
    """The routes.

    Args:
        server: The API server.
    """

    def __init__(self, server: APIServerHandle) -> None:
        self._server = server

    def add_to(self, router: APIRouter) -> None:
        """Adds the routes to a router."""
        add, add_body = router.add_api_route, self._server.body_routes.add
        summary = "Stop computing; further requests wait."
        add("/pause", self.pause, methods=["POST"], summary=summary, query=PauseQuery)
        add("/resume", self.resume, methods=["POST"], summary="Continue after /pause.")
        add("/is_paused", self.is_paused, methods=["GET"], summary="Whether the engine is paused.")
        add_body(
            router,
            "/init_weight_transfer_engine",
            InitWeightTransferRequest,
            self.init_transfer,
            "Join a trainer's process group.",
        )
        add("/start_weight_update", self.start, methods=["POST"], summary="Begin a weight update.")
        add_body(router, "/update_weights", UpdateWeightsRequest, self.update, "Load weights into the running model.")
        add_body(router, "/finish_weight_update", FinishWeightUpdateRequest, self.finish, "End a weight update.")
        add("/abandon_weight_update", self.abandon, methods=["POST"], summary="Drop a weight update.")
        add("/weight_info", self.weight_info, methods=["GET"], summary="The version of the weights.")
        add_body(
            router, "/v1/update_lora_adapter", UpdateLoRAAdapterRequest, self.update_lora, "Update a LoRA adapter."
        )
        add_body(router, "/collective_rpc", CollectiveRpcRequest, self.collective_rpc, "Call a method of the workers.")

    async def pause(self, request: Request) -> Response:
        """Pauses the engine; answers when no step runs."""
        engine = self._engine(request)
        query = self._server.body_routes.reader.read_query(request, PauseQuery)
        await engine.pause_generation(mode=query.mode, clear_cache=query.clear_cache)
        return json_response({"is_paused": True})

    async def resume(self, request: Request) -> Response:
        """Continues."""
        await self._engine(request).resume_generation()
        return json_response({"is_paused": False})

    async def is_paused(self, request: Request) -> Response:
        """Whether the engine is paused."""
        return json_response({"is_paused": await self._engine(request).is_paused()})

    async def init_transfer(self, request: Request) -> Response:
        """Joins a trainer's process group; answers when all of its ranks have joined."""
        engine = self._engine(request)
        body = await self._server.body_routes.decode(request, InitWeightTransferRequest)
        with _update_errors():
            await engine.init_weight_transfer_engine(body.init_info or {})
        return json_response({"message": "Weight transfer initialized"})

    async def start(self, request: Request) -> Response:
        """Begins a weight update."""
        engine = self._engine(request)
        with _update_errors():
            await engine.start_weight_update()
        return await self._info(engine)

    async def update(self, request: Request) -> Response:
        """Loads a part of a weight update; without one, a whole update."""
        engine = self._engine(request)
        body = await self._server.body_routes.decode(request, UpdateWeightsRequest)
        info = body.update_info or {}
        if "tensors" in info or "safetensors" in info:
            raise RequestError(
                "Over HTTP, weights come from a path, shared_memory or a broadcast.", parameter="update_info"
            )
        with _update_errors():
            await engine.update_weights(info)
        return await self._info(engine)

    async def finish(self, request: Request) -> Response:
        """Ends a weight update."""
        engine = self._engine(request)
        body = await self._server.body_routes.decode(request, FinishWeightUpdateRequest)
        with _update_errors():
            await engine.finish_weight_update(
                body.weight_version, reset_running_requests=bool(body.reset_running_requests)
            )
        return await self._info(engine)

    async def abandon(self, request: Request) -> Response:
        """Drops a weight update."""
        engine = self._engine(request)
        await engine.abandon_weight_update()
        return await self._info(engine)

    async def weight_info(self, request: Request) -> Response:
        """The version of the weights, whether an update is under way, and why they are unusable, if they are."""
        return await self._info(self._engine(request))

    async def update_lora(self, request: Request) -> Response:
        """Loads the files of an adapter anew, or those of another folder under its name."""
        engine = self._engine(request)
        body = await self._server.body_routes.decode(request, UpdateLoRAAdapterRequest)
        await self._server.models.update_lora_adapter(engine, body.lora_name or "", body.lora_path)
        return await self._info(engine)

    async def collective_rpc(self, request: Request) -> Response:
        """Calls a method of `worker_extension_cls` on every worker."""
        engine = self._engine(request)
        body = await self._server.body_routes.decode(request, CollectiveRpcRequest)
        try:
            results = await engine.collective_rpc(body.method or "", tuple(body.args or ()), body.kwargs)
        except ConfigError as e:
            raise APIError(400, str(e), code="unknown_method") from e
        except PlatformError as e:
            raise APIError(500, str(e), code="method_failed") from e
        return json_response({"results": results})

    def _engine(self, request: Request) -> AsyncLLM:
        require_admin(request)
        return self._server.state.engine

    async def _info(self, engine: AsyncLLM) -> Response:
        return json_response(await engine.weight_info())


@contextmanager
def _update_errors() -> Iterator[None]:
    """Raises errors of weight updates as those of HTTP: 501 if the platform has no updates, 503 if this one failed."""
    try:
        yield
    except UnsupportedMethodError as e:
        raise APIError(501, str(e), code="weight_updates_unsupported") from e
    except (ModelError, PlatformError) as e:
        raise APIError(503, str(e), code="update_failed") from e

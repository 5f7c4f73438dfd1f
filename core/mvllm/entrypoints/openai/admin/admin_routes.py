"""Routes of administration, which need an administrator's key: sleep, caches, LoRA adapters, server info, and for
reinforcement learning pause, weight updates and calls of the workers."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast, get_type_hints

import msgspec
from starlette.requests import Request

from mvllm.engine.async_llm import AsyncLLM
from mvllm.entrypoints.openai.client_request import ModelRequest
from mvllm.entrypoints.openai.common.api_router import APIRouter
from mvllm.entrypoints.openai.common.errors import APIError
from mvllm.entrypoints.openai.protocol import (
    CollectiveRpcRequest,
    FinishWeightUpdateRequest,
    InitWeightTransferRequest,
    LoadLoRAAdapterRequest,
    UnloadLoRAAdapterRequest,
    UpdateLoRAAdapterRequest,
    UpdateWeightsRequest,
)
from mvllm.entrypoints.openai.response_types import (
    CacheReset,
    LoadedAdapter,
    PauseState,
    RpcResults,
    ServerInfo,
    SleepState,
    UnloadedAdapter,
    WeightState,
    WeightTransferState,
)
from mvllm.entrypoints.openai.server.middleware import require_admin
from mvllm.entrypoints.openai.server.server_handle import APIServerHandle
from mvllm.entrypoints.root_plugins import loaded_plugins
from mvllm.errors import ConfigError, ModelError, PlatformError, RequestError, UnsupportedMethodError
from mvllm.version import __version__


class NoQuery(msgspec.Struct):
    """No query parameters: all are unknown."""


class SleepQuery(msgspec.Struct):
    """Query of `/sleep`."""

    level: int = 1


class WakeUpQuery(msgspec.Struct):
    """Query of `/wake_up`."""

    tags: list[str] | None = None


class PauseQuery(msgspec.Struct):
    """Query of `/pause`."""

    mode: str = "abort"
    clear_cache: bool = True


class AdminRoutes:
    """The routes. A handler gets the engine and the query or the body, and returns a value that is sent as JSON.

    Args:
        server: The API server.
    """

    def __init__(self, server: APIServerHandle) -> None:
        self._server = server

    def add_to(self, router: APIRouter) -> None:
        """Adds the routes to a router."""
        add = functools.partial(self._add, router)
        add("POST", "/reset_prefix_cache", self.reset_prefix_cache, "Clear the prefix cache.", query=NoQuery)
        add("POST", "/reset_mm_cache", self.reset_mm_cache, "Clear the caches of images and others.", query=NoQuery)
        shown = functools.partial(_show_errors, "sleep_failed")
        add("POST", "/sleep", self.sleep, "Free device memory and accept no requests.", query=SleepQuery, errors=shown)
        shown = functools.partial(_show_errors, "wake_up_failed")
        summary = "Allocate the memory and accept requests again."
        add("POST", "/wake_up", self.wake_up, summary, query=WakeUpQuery, errors=shown)
        add("GET", "/is_sleeping", self.is_sleeping, "Whether the engine sleeps.")
        checked = functools.partial(add, check=self._check_runtime_lora)
        checked("POST", "/v1/load_lora_adapter", self.load, "Load a LoRA adapter.", body=LoadLoRAAdapterRequest)
        checked("POST", "/v1/unload_lora_adapter", self.unload, "Unload a LoRA adapter.", body=UnloadLoRAAdapterRequest)
        summary = "Version, model and platform."
        router.add_api_route("/server_info", self.server_info, summary=summary, response=ServerInfo)

        add("POST", "/pause", self.pause, "Stop computing; further requests wait.", query=PauseQuery)
        add("POST", "/resume", self.resume, "Continue after /pause.")
        add("GET", "/is_paused", self.is_paused, "Whether the engine is paused.")
        update = functools.partial(add, errors=_update_errors)
        path, summary = "/init_weight_transfer_engine", "Join a trainer's process group."
        update("POST", path, self.init_transfer, summary, body=InitWeightTransferRequest)
        update("POST", "/start_weight_update", self.start, "Begin a weight update.")
        summary = "Load weights into the running model."
        update("POST", "/update_weights", self.update, summary, body=UpdateWeightsRequest)
        update("POST", "/finish_weight_update", self.finish, "End a weight update.", body=FinishWeightUpdateRequest)
        add("POST", "/abandon_weight_update", self.abandon, "Drop a weight update.")
        add("GET", "/weight_info", self.weight_info, "The version of the weights.")
        summary = "Update a LoRA adapter."
        add("POST", "/v1/update_lora_adapter", self.update_lora, summary, body=UpdateLoRAAdapterRequest)
        summary = "Call a method of the workers."
        add("POST", "/collective_rpc", self.collective_rpc, summary, body=CollectiveRpcRequest, errors=_rpc_errors)

    def _add(
        self,
        router: APIRouter,
        method: str,
        path: str,
        handle: Callable[..., Awaitable[Any]],
        summary: str,
        *,
        query: type[msgspec.Struct] | None = None,
        body: type[ModelRequest] | None = None,
        check: Callable[[], None] = lambda: None,
        errors: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Adds one route. Its response has the type that the handler is annotated with.

        Args:
            query: The type of its query parameters; None if they are ignored.
            body: The type of its body; None for none.
            check: Raises if the server cannot have such requests.
            errors: The context that the handler runs in.
        """
        body_routes, response = self._server.body_routes, get_type_hints(handle)["return"]

        @functools.wraps(handle)
        async def endpoint(request: Request) -> Any:
            require_admin(request)
            check()
            arguments: list[Any] = [self._server.state.engine]
            if query is not None:
                arguments.append(body_routes.reader.read_query(request, query))
            if body is not None:
                arguments.append(await body_routes.decode(request, body))
            with errors():
                return await handle(*arguments)

        if body is not None:
            body_routes.add(router, path, body, endpoint, summary, response=response)
        else:
            shown = None if query is NoQuery else query
            router.add_api_route(path, endpoint, methods=[method], summary=summary, query=shown, response=response)

    async def reset_prefix_cache(self, engine: AsyncLLM, query: NoQuery) -> CacheReset:
        """Clears the prefix cache; `reset` is false if running requests use cached blocks."""
        return {"reset": await engine.reset_prefix_cache()}

    async def reset_mm_cache(self, engine: AsyncLLM, query: NoQuery) -> CacheReset:
        """Drops prepared items, and results of encoders; `reset` is false if running requests use some."""
        return {"reset": await engine.reset_mm_cache()}

    async def sleep(self, engine: AsyncLLM, query: SleepQuery) -> SleepState:
        """Aborts running requests and puts the engine to sleep."""
        await engine.sleep(query.level)
        return {"is_sleeping": engine.is_asleep}

    async def wake_up(self, engine: AsyncLLM, query: WakeUpQuery) -> SleepState:
        """Wakes the engine up; with `tags`, allocates only `weights` or `kv_cache`."""
        await engine.wake_up(query.tags)
        return {"is_sleeping": engine.is_asleep}

    async def is_sleeping(self, engine: AsyncLLM) -> SleepState:
        """Whether the engine sleeps."""
        return {"is_sleeping": engine.is_asleep}

    async def load(self, engine: AsyncLLM, body: LoadLoRAAdapterRequest) -> LoadedAdapter:
        """Loads a LoRA adapter. Requests may then name it as their model."""
        name, path = _required(body.lora_name, "lora_name"), _required(body.lora_path, "lora_path")
        await self._server.models.load_lora_adapter(engine, name, path)
        return {"id": name, "object": "model", "root": path, "parent": self._server.models.name}

    async def unload(self, engine: AsyncLLM, body: UnloadLoRAAdapterRequest) -> UnloadedAdapter:
        """Unloads a LoRA adapter. Its running requests continue."""
        name = _required(body.lora_name, "lora_name")
        await self._server.models.unload_lora_adapter(engine, name)
        return {"id": name, "object": "model", "deleted": True}

    async def update_lora(self, engine: AsyncLLM, body: UpdateLoRAAdapterRequest) -> WeightState:
        """Loads the files of an adapter anew, or those of another folder under its name."""
        await self._server.models.update_lora_adapter(engine, body.lora_name or "", body.lora_path)
        return await _weight_state(engine)

    async def server_info(self, request: Request) -> ServerInfo:
        """Version, phase, plugins, platform, workers of all replicas, and model."""
        require_admin(request)
        engine = self._server.state.loaded_engine
        used = [each.name for each, _ in loaded_plugins(self._server.server_settings.disabled_http_plugins)]
        info: ServerInfo = {
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
            info["model"] = {
                "model": model.model,
                "architecture": model.architecture,
                "dtype": model.dtype,
                "max_model_len": model.max_model_len,
                "quantization": model.quantization,
                "logprobs_mode": model.logprobs_mode,
            }
        return info

    async def pause(self, engine: AsyncLLM, query: PauseQuery) -> PauseState:
        """Pauses the engine; answers when no step runs."""
        await engine.pause_generation(mode=query.mode, clear_cache=query.clear_cache)
        return {"is_paused": True}

    async def resume(self, engine: AsyncLLM) -> PauseState:
        """Continues."""
        await engine.resume_generation()
        return {"is_paused": False}

    async def is_paused(self, engine: AsyncLLM) -> PauseState:
        """Whether the engine is paused."""
        return {"is_paused": await engine.is_paused()}

    async def init_transfer(self, engine: AsyncLLM, body: InitWeightTransferRequest) -> WeightTransferState:
        """Joins a trainer's process group; answers when all of its ranks have joined."""
        await engine.init_weight_transfer_engine(body.init_info or {})
        return {"message": "Weight transfer initialized"}

    async def start(self, engine: AsyncLLM) -> WeightState:
        """Begins a weight update."""
        await engine.start_weight_update()
        return await _weight_state(engine)

    async def update(self, engine: AsyncLLM, body: UpdateWeightsRequest) -> WeightState:
        """Loads a part of a weight update; without one, a whole update."""
        info = body.update_info or {}
        if "tensors" in info or "safetensors" in info:
            raise RequestError(
                "Over HTTP, weights come from a path, shared_memory or a broadcast.", parameter="update_info"
            )
        await engine.update_weights(info)
        return await _weight_state(engine)

    async def finish(self, engine: AsyncLLM, body: FinishWeightUpdateRequest) -> WeightState:
        """Ends a weight update."""
        reset = bool(body.reset_running_requests)
        await engine.finish_weight_update(body.weight_version, reset_running_requests=reset)
        return await _weight_state(engine)

    async def abandon(self, engine: AsyncLLM) -> WeightState:
        """Drops a weight update."""
        await engine.abandon_weight_update()
        return await _weight_state(engine)

    async def weight_info(self, engine: AsyncLLM) -> WeightState:
        """The version of the weights, whether an update is under way, and why they are unusable, if they are."""
        return await _weight_state(engine)

    async def collective_rpc(self, engine: AsyncLLM, body: CollectiveRpcRequest) -> RpcResults:
        """Calls a method of `worker_extension_cls` on every worker."""
        results = await engine.collective_rpc(body.method or "", tuple(body.args or ()), body.kwargs)
        return {"results": results}

    def _check_runtime_lora(self) -> None:
        if not self._server.server_settings.runtime_lora_loading:
            raise APIError(
                400,
                "Each of several API servers would know only its own adapters: name them at the start "
                "(--lora-modules), or run with --api-server-count 1.",
                code="adapters_are_fixed",
            )


@contextmanager
def _show_errors(code: str) -> Iterator[None]:
    """Returns errors of the configuration, the model and the platform to the client; otherwise they are only logged."""
    try:
        yield
    except (ConfigError, ModelError, PlatformError) as e:
        raise APIError(503, str(e), code=code, retry_after=1) from e


@contextmanager
def _update_errors() -> Iterator[None]:
    """Raises errors of weight updates as those of HTTP: 501 if the platform has no updates, 503 if this one failed."""
    try:
        yield
    except UnsupportedMethodError as e:
        raise APIError(501, str(e), code="weight_updates_unsupported") from e
    except (ModelError, PlatformError) as e:
        raise APIError(503, str(e), code="update_failed") from e


@contextmanager
def _rpc_errors() -> Iterator[None]:
    """Raises errors of methods of workers as those of HTTP."""
    try:
        yield
    except ConfigError as e:
        raise APIError(400, str(e), code="unknown_method") from e
    except PlatformError as e:
        raise APIError(500, str(e), code="method_failed") from e


async def _weight_state(engine: AsyncLLM) -> WeightState:
    return cast(WeightState, await engine.weight_info())


def _required(value: str | None, name: str) -> str:
    if not value:
        raise RequestError(f"{name} is missing.", parameter=name)
    return value

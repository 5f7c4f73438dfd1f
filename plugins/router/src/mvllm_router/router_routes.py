"""Routes that the router answers itself: those that concern all models, and those that load and unload them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mvllm.extension_api import APIError
from mvllm.extension_api.cli import __version__
from mvllm.extension_api.server import (
    BodyDecoder,
    BodyReader,
    HTTPMetrics,
    Role,
    api_format,
    cancel_on_disconnect,
    json_response,
    request_caller,
    require_admin,
)
from mvllm_router.merged_metrics import merge_metrics
from mvllm_router.model_catalog import ModelCatalog
from mvllm_router.model_pool import ModelPool
from mvllm_router.model_server import ModelServerProcess
from mvllm_router.pooled_model import ModelState, PooledModel, shutting_down_error
from mvllm_router.router_app import ONE_MODEL_PREFIX, Endpoint


class ModelNameRequest(msgspec.Struct):
    """Body of requests that only name a model. `name` is Ollama's older field."""

    model: str | None = None
    name: str | None = None


class ModelRoutes:
    """The routes.

    Args:
        pool: The models.
        catalog: Finds and describes models.
        reader: Reads bodies.
        own_metrics: The router's metrics.
        phase: Returns the server's phase: `ready` or `draining`.
    """

    def __init__(
        self,
        pool: ModelPool,
        catalog: ModelCatalog,
        reader: BodyReader,
        own_metrics: HTTPMetrics,
        phase: Callable[[], str],
    ) -> None:
        self._pool = pool
        self._catalog = catalog
        self._reader = reader
        self._own_metrics = own_metrics
        self._phase = phase
        self._decoder = BodyDecoder(ModelNameRequest)

    def table(self) -> dict[tuple[str, str], Endpoint]:
        """The routes by method and path."""
        return {
            ("GET", "/v1/models"): self.list_models,
            ("GET", "/models"): self.list_models,
            ("GET", ONE_MODEL_PREFIX): self.get_model,
            ("POST", "/models/load"): self.load,
            ("POST", "/models/unload"): self.unload,
            ("GET", "/metrics"): self.metrics,
            ("GET", "/load"): self.server_load,
            ("GET", "/server_info"): self.server_info,
            ("GET", "/api/tags"): self.tags,
            ("GET", "/api/ps"): self.running_models,
            ("POST", "/api/show"): self.show,
            ("GET", "/health"): self.health,
            ("GET", "/health/live"): self.liveness,
            ("GET", "/ping"): self.liveness,
            ("POST", "/ping"): self.liveness,
            ("GET", "/health/ready"): self.readiness,
        }

    # --- health and load

    async def health(self, request: Request) -> Response:
        """As `liveness`, and whether no pinned model is loading."""
        for model in self._pool.models.values():
            if model.entry.is_pinned and model.state is ModelState.LOADING:
                return self._status(request, "a pinned model is loading", model)
        return self._status(request, None)

    async def liveness(self, request: Request) -> Response:
        """Whether the router works, and the states of its models. A model that fails does not make it unhealthy."""
        return self._status(request, None)

    async def readiness(self, request: Request) -> Response:
        """Whether requests are accepted: pinned models are loaded, and the server does not shut down."""
        if (phase := self._phase()) != "ready":
            return self._status(request, f"the server is {phase}")
        for model in self._pool.models.values():
            if model.entry.is_pinned and model.server is None:
                return self._status(request, f"a pinned model is {model.state.value}", model)
            if model.entry.is_pinned and model.state is ModelState.LOADING:
                return self._status(request, "a pinned model is loading", model)
        return self._status(request, None)

    def _status(self, request: Request, reason: str | None, model: PooledModel | None = None) -> Response:
        fields: dict[str, Any] = {"status": reason or "ok"}
        if request_caller(request.scope).role >= Role.USER:  # probes need no key, but names of models do
            fields["models"] = {name: each.state.value for name, each in self._pool.models.items()}
            if model is not None:
                fields |= {"model": model.entry.name, "error": model.failure_text}
        return json_response(fields, 200 if reason is None else 503)

    async def server_load(self, request: Request) -> Response:
        """Requests now, of all models and of each."""
        models = {
            name: {"state": each.state.value, "in_flight": each.num_in_flight, "waiting": each.num_waiting}
            for name, each in self._pool.models.items()
        }
        running = sum(each.num_in_flight for each in self._pool.models.values())
        waiting = sum(each.num_waiting for each in self._pool.models.values())
        return json_response(
            {
                "server_load": running + waiting,
                "phase": self._phase(),
                "num_requests_running": running,
                "num_requests_waiting": waiting,
                "models": models,
            }
        )

    async def metrics(self, request: Request) -> Response:
        """The metrics of the router and of all loaded models, with the label `model_name`."""
        loaded = [each for each in self._pool.loaded() if isinstance(each.server, ModelServerProcess)]
        pages = await asyncio.gather(
            *(each.server.client.fetch("/metrics") for each in loaded if isinstance(each.server, ModelServerProcess))
        )
        named = [(each.entry.name, page.decode()) for each, page in zip(loaded, pages) if page is not None]
        merged = await asyncio.to_thread(merge_metrics, self._own_metrics.exposition().decode(), named)
        return Response(merged, media_type=HTTPMetrics.content_type)

    async def server_info(self, request: Request) -> Response:
        """Version, phase and models. `?model=NAME` has that of one model's server."""
        require_admin(request)
        models = {name: self._catalog.status(each) for name, each in self._pool.models.items()}
        return json_response({"version": __version__, "phase": self._phase(), "models": models})

    # --- models

    async def list_models(self, request: Request) -> Response:
        """All models with their states, in the format of the client's API."""
        await self._catalog.update()
        await self._catalog.update_facts()
        cards = self._catalog.cards()
        return json_response(api_format(request.scope).model_list(cards))

    async def get_model(self, request: Request) -> Response:
        """One model, in the format of the client's API."""
        name = request.scope["path"].removeprefix(ONE_MODEL_PREFIX)
        model = await self._catalog.resolve(name, request.scope["path"])
        [card] = [card for card in self._catalog.cards_of(model) if card["id"] == name]
        return json_response(api_format(request.scope).model(card))

    async def load(self, request: Request) -> Response:
        """Loads a model, if it is not loaded; responds when it is."""
        model = await self._named_by_admin(request)
        if self._phase() != "ready":
            raise shutting_down_error()
        async with cancel_on_disconnect(request.receive):
            await self._pool.load(model)
        return json_response({"success": True, "model": model.entry.name, "status": self._catalog.status(model)})

    async def unload(self, request: Request) -> Response:
        """Unloads a model when its requests have ended."""
        model = await self._named_by_admin(request)
        was_loaded = await self._pool.unload(model)
        status = self._catalog.status(model)
        return json_response({"success": True, "model": model.entry.name, "was_loaded": was_loaded, "status": status})

    async def _named_by_admin(self, request: Request) -> PooledModel:
        require_admin(request)
        body = self._decoder.decode(await self._reader.read(request))
        if body.model is None:
            raise APIError(400, "model is missing.", param="model")
        return await self._catalog.resolve(body.model, request.scope["path"])

    # --- Ollama

    async def tags(self, request: Request) -> Response:
        """All models, in Ollama's format."""
        await self._catalog.update()
        return json_response({"models": await self._catalog.ollama_tags(api_format(request.scope))})

    async def running_models(self, request: Request) -> Response:
        """The loaded models, in Ollama's format."""
        return json_response({"models": await self._catalog.ollama_running()})

    async def show(self, request: Request) -> Response:
        """Details of a model, in Ollama's format. It is not loaded for this: clients ask for all models in turn."""
        body = self._decoder.decode(await self._reader.read(request))
        model = await self._catalog.resolve(body.model or body.name, request.scope["path"])
        if (data := await self._catalog.ollama_details(model)) is not None:
            return json_response(data)
        return json_response(api_format(request.scope).model(self._catalog.cards_of(model)[0]))

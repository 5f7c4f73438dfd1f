"""All routes of the server, grouped by use: a tag of the API's description is a router here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mvllm.entrypoints.openai.admin.admin_routes import AdminRoutes
from mvllm.entrypoints.openai.audio.audio_routes import AudioRoutes
from mvllm.entrypoints.openai.chat_completions import ChatCompletionHandler, StoreCompletion
from mvllm.entrypoints.openai.common.api_format import api_format
from mvllm.entrypoints.openai.common.api_router import APIRouter
from mvllm.entrypoints.openai.common.json_response import json_response
from mvllm.entrypoints.openai.common.model_facts import model_facts
from mvllm.entrypoints.openai.completions import CompletionHandler
from mvllm.entrypoints.openai.pooling.embeddings import embedding_handler, pooling_handler
from mvllm.entrypoints.openai.pooling.scores import classification_handler, rerank_handler, score_handler
from mvllm.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    ClassificationRequest,
    CompletionRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from mvllm.entrypoints.openai.server.http_metrics import CONTENT_TYPE, HTTPMetrics
from mvllm.entrypoints.openai.server.server_handle import APIServerHandle
from mvllm.entrypoints.openai.server.server_state import ServerPhase
from mvllm.entrypoints.openai.tokenize_routes import TokenizeRoutes
from mvllm.version import __version__

_POOLING: tuple[tuple[str, Any, Any, str], ...] = (
    ("/v1/embeddings", EmbeddingRequest, embedding_handler, "Embeddings of texts."),
    ("/pooling", PoolingRequest, pooling_handler, "Embeddings of texts or of each token, or scores of texts."),
    ("/classify", ClassificationRequest, classification_handler, "Classify texts."),
    ("/v1/score", ScoreRequest, score_handler, "Score pairs of texts."),
    ("/score", ScoreRequest, score_handler, "Score pairs of texts."),
    ("/v1/rerank", RerankRequest, rerank_handler, "Sort documents by their relevance for a query."),
    ("/rerank", RerankRequest, rerank_handler, "Sort documents by their relevance for a query."),
    ("/v2/rerank", RerankRequest, rerank_handler, "Sort documents by their relevance for a query."),
)


class Routes:
    """The routes of the server.

    Args:
        server: The API server.
        metrics: The metrics at `/metrics`.
        store_completion: Stores chat completions; None if the server stores none.

    Attributes:
        routers: All routes, with the tags of `openapi.TAGS`.
    """

    def __init__(
        self, server: APIServerHandle, metrics: HTTPMetrics, store_completion: StoreCompletion | None = None
    ) -> None:
        self._state, self._models = server.state, server.models
        self._body_routes = body_routes = server.body_routes
        self._metrics = metrics
        self._store_completion = store_completion
        self._facts: dict[str, Any] | None = None
        tags = ("health", "generation", "embeddings", "models", "tokens", "monitoring", "admin")
        self.routers = [APIRouter(tags=[tag]) for tag in tags]
        health, generation, embeddings, model_names, tokens, monitoring, admin = self.routers

        summary = "Whether the model is loaded and the server works."
        health.add_api_route("/health", self.health, methods=["GET"], summary=summary)
        health.add_api_route("/health/live", self.liveness, methods=["GET"], summary="Whether the server works.")
        for method in ("GET", "POST"):
            health.add_api_route("/ping", self.liveness, methods=[method], summary="Whether the server works.")
        health.add_api_route("/health/ready", self.readiness, methods=["GET"], summary="Whether it accepts requests.")

        summary = "Generate the next message of a conversation."
        body_routes.add(generation, "/v1/chat/completions", ChatCompletionRequest, self.chat_completion, summary)
        body_routes.add_handler(
            generation, "/v1/completions", CompletionRequest, CompletionHandler, "Continue prompts."
        )
        AudioRoutes(server).add_to(generation)
        for route in _POOLING:
            body_routes.add_handler(embeddings, *route, with_adapters=False)

        model_names.add_api_route("/v1/models", self.list_models, methods=["GET"], summary="The models.")
        model_names.add_api_route("/v1/models/{model_id:path}", self.get_model, methods=["GET"], summary="One model.")
        TokenizeRoutes(server).add_to(tokens)
        monitoring.add_api_route("/version", self.version, methods=["GET"], summary="The server's version.")
        monitoring.add_api_route("/load", self.load, methods=["GET"], summary="Requests and cache usage, now.")
        monitoring.add_api_route("/metrics", self.get_metrics, methods=["GET"], summary="Metrics for Prometheus.")
        AdminRoutes(server).add_to(admin)

    async def chat_completion(self, request: Request) -> Response:
        """Generates the next message of a conversation."""
        context, model, body = await self._body_routes.decode_for_model(request, ChatCompletionRequest)
        handler = ChatCompletionHandler(context, model, body)
        if body.store is True and self._store_completion is not None:
            return await self._body_routes.run(request, self._store_completion(handler, body, request), model)
        return await self._body_routes.run(request, handler, model)

    async def health(self, request: Request) -> Response:
        """As `liveness`, and whether the model is loaded, for which clients of other engines wait."""
        return _status_response(self._state.unhealthy_reason() or self._state.loading_reason())

    async def liveness(self, request: Request) -> Response:
        """Whether the process and its engine make progress. Answered from memory."""
        return _status_response(self._state.unhealthy_reason())

    async def readiness(self, request: Request) -> Response:
        """Whether the server accepts requests. Answered from memory."""
        return _status_response(self._state.not_ready_reason())

    async def list_models(self, request: Request) -> Mapping[str, Any]:
        """The names of the model and of LoRA adapters, in the format of the client's API."""
        return api_format(request.scope).model_list(await self._model_cards())

    async def get_model(self, request: Request) -> Mapping[str, Any]:
        """One of the names, in the format of the client's API."""
        model_id: str = request.path_params["model_id"]
        self._models.resolve_name(model_id, with_adapters=True)
        [card] = [card for card in await self._model_cards() if card["id"] == model_id]
        return api_format(request.scope).model(card)

    async def version(self, request: Request) -> dict[str, str]:
        """The version of mvllm."""
        return {"version": __version__}

    async def load(self, request: Request) -> dict[str, Any]:
        """Requests, cache usage and throughput, now."""
        state, engine = self._state, self._state.loaded_engine
        fields: dict[str, Any] = {"server_load": state.total_num_in_flight, "phase": state.phase.value}
        if engine is not None and state.phase is not ServerPhase.DEAD:
            load = engine.load
            fields |= {
                "num_requests_running": load.num_running,
                "num_requests_waiting": load.num_waiting,
                "kv_cache_usage": load.kv_cache_usage,
                "prompt_tokens_per_second": load.prompt_tokens_per_second,
                "generation_tokens_per_second": load.generation_tokens_per_second,
            }
        return fields

    async def get_metrics(self, request: Request) -> Response:
        """The metrics in Prometheus' format."""
        return Response(self._metrics.exposition(), media_type=CONTENT_TYPE)

    async def _model_cards(self) -> list[dict[str, Any]]:
        context = self._state.loaded_context
        if context is None:
            return self._models.model_cards(None)
        if self._facts is None:
            self._facts = await model_facts(context)
        return self._models.model_cards(context.engine.model_config.max_model_len, self._facts)


def _status_response(reason: str | None) -> Response:
    """200 if there is no reason to report, else 503."""
    return json_response({"status": "ok"}) if reason is None else json_response({"status": reason}, 503)

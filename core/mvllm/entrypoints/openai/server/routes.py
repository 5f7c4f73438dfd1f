"""All routes of the server, grouped by use: a tag of the API's description is a router here."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Union

from starlette.requests import Request
from starlette.responses import Response

from mvllm.entrypoints.openai.admin.admin_routes import AdminRoutes
from mvllm.entrypoints.openai.audio.audio_routes import AudioRoutes
from mvllm.entrypoints.openai.chat_completions import ChatCompletionHandler, StoreCompletion
from mvllm.entrypoints.openai.common.api_format import api_format
from mvllm.entrypoints.openai.common.api_router import APIRouter
from mvllm.entrypoints.openai.common.json_response import json_response
from mvllm.entrypoints.openai.common.model_facts import model_facts
from mvllm.entrypoints.openai.common.openapi import response_schema
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
from mvllm.entrypoints.openai.response_types import (
    ChatCompletion,
    ChatCompletionChunk,
    ClassificationResponse,
    Completion,
    CompletionChunk,
    EmbeddingList,
    HealthStatus,
    LoadResponse,
    ModelCard,
    ModelList,
    PoolingResponse,
    RerankResponse,
    ScoreResponse,
    VersionResponse,
)
from mvllm.entrypoints.openai.server.http_metrics import CONTENT_TYPE, HTTPMetrics
from mvllm.entrypoints.openai.server.server_handle import APIServerHandle
from mvllm.entrypoints.openai.server.server_state import ServerPhase
from mvllm.entrypoints.openai.tokenize_routes import TokenizeRoutes
from mvllm.entrypoints.root_plugins import api_formats
from mvllm.version import __version__

_POOLING: tuple[tuple[str, Any, Any, str, Any], ...] = (
    ("/v1/embeddings", EmbeddingRequest, embedding_handler, "Embeddings of texts.", EmbeddingList),
    ("/pooling", PoolingRequest, pooling_handler, "Embeddings of texts or of each token, or scores.", PoolingResponse),
    ("/classify", ClassificationRequest, classification_handler, "Classify texts.", ClassificationResponse),
    ("/v1/score", ScoreRequest, score_handler, "Score pairs of texts.", ScoreResponse),
    ("/score", ScoreRequest, score_handler, "Score pairs of texts.", ScoreResponse),
    ("/v1/rerank", RerankRequest, rerank_handler, "Sort documents by relevance for a query.", RerankResponse),
    ("/rerank", RerankRequest, rerank_handler, "Sort documents by relevance for a query.", RerankResponse),
    ("/v2/rerank", RerankRequest, rerank_handler, "Sort documents by relevance for a query.", RerankResponse),
)

_UNHEALTHY = {"responses": {"503": {**response_schema(HealthStatus)["responses"]["200"], "description": "It is not."}}}


def _streamed(whole: Any, event: Any) -> dict[str, Any]:
    """The types of a response that may be a stream."""
    return {"application/json": whole, "text/event-stream": event}


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
        probe = functools.partial(health.add_api_route, response=HealthStatus, openapi_extra=_UNHEALTHY)
        probe("/health", self.health, summary=summary)
        probe("/health/live", self.liveness, summary="Whether the server works.")
        for method in ("GET", "POST"):
            probe("/ping", self.liveness, methods=[method], summary="Whether the server works.")
        probe("/health/ready", self.readiness, summary="Whether it accepts requests.")

        summary = "Generate the next message of a conversation."
        chat = (ChatCompletionRequest, self.chat_completion, summary)
        body_routes.add(
            generation, "/v1/chat/completions", *chat, response=_streamed(ChatCompletion, ChatCompletionChunk)
        )
        completion = (CompletionRequest, CompletionHandler, "Continue prompts.")
        response = _streamed(Completion, CompletionChunk)
        body_routes.add_handler(generation, "/v1/completions", *completion, response=response)
        AudioRoutes(server).add_to(generation)
        for *route, pooled in _POOLING:
            body_routes.add_handler(embeddings, *route, with_adapters=False, response=pooled)

        formats = api_formats(server.server_settings.disabled_http_plugins)
        lists: Any = Union[(ModelList, *(each.model_list_type for each in formats if each.model_list_type))]
        cards: Any = Union[(ModelCard, *(each.model_type for each in formats if each.model_type))]
        model_names.add_api_route("/v1/models", self.list_models, summary="The models.", response=lists)
        model_names.add_api_route("/v1/models/{model_id:path}", self.get_model, summary="One model.", response=cards)
        TokenizeRoutes(server).add_to(tokens)
        monitoring.add_api_route("/version", self.version, summary="The server's version.", response=VersionResponse)
        monitoring.add_api_route("/load", self.load, summary="Requests and cache usage, now.", response=LoadResponse)
        text = {"text/plain": str}
        monitoring.add_api_route("/metrics", self.get_metrics, summary="Metrics for Prometheus.", response=text)
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

    async def version(self, request: Request) -> VersionResponse:
        """The version of mvllm."""
        return {"version": __version__}

    async def load(self, request: Request) -> LoadResponse:
        """Requests, cache usage and throughput, now."""
        state, engine = self._state, self._state.loaded_engine
        fields: LoadResponse = {"server_load": state.total_num_in_flight, "phase": state.phase.value}
        if engine is not None and state.phase is not ServerPhase.DEAD:
            load = engine.load
            fields["num_requests_running"] = load.num_running
            fields["num_requests_waiting"] = load.num_waiting
            fields["kv_cache_usage"] = load.kv_cache_usage
            fields["prompt_tokens_per_second"] = load.prompt_tokens_per_second
            fields["generation_tokens_per_second"] = load.generation_tokens_per_second
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

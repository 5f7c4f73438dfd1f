"""The routes of requests that generate nothing: vectors, scores, and documents in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mvllm.engine.async_llm import AsyncLLM
from mvllm.entrypoints.openai.common.openapi import request_body_schema
from mvllm.entrypoints.openai.common.request_body import BodyDecoder, BodyReader
from mvllm.entrypoints.openai.common.serving_models import OpenAIServingModels
from mvllm.entrypoints.openai.common.streaming_response import cancel_on_disconnect
from mvllm.entrypoints.openai.common.tokenizer_pool import TokenizerPool
from mvllm.entrypoints.openai.pooling.serving_base import BasePoolingHandler
from mvllm.entrypoints.openai.pooling.serving_embedding import EmbeddingHandler, PoolingHandler
from mvllm.entrypoints.openai.pooling.serving_score import ClassificationHandler, RerankHandler, ScoreHandler
from mvllm.entrypoints.openai.protocol import (
    ClassificationRequest,
    EmbeddingRequest,
    ModelRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from mvllm.entrypoints.openai.server.server_state import ServerState


class _HandlerFactory(Protocol):
    """A kind of call."""

    def __call__(self, engine: AsyncLLM, tokenizer_pool: TokenizerPool, model: str, request: Any) -> BasePoolingHandler:
        """One request."""


_ROUTES: tuple[tuple[tuple[str, ...], type[ModelRequest], _HandlerFactory, str], ...] = (
    (("/v1/embeddings",), EmbeddingRequest, EmbeddingHandler, "Make vectors of texts."),
    (("/pooling",), PoolingRequest, PoolingHandler, "Vectors, vectors of each token, or scores of texts."),
    (("/classify",), ClassificationRequest, ClassificationHandler, "Classify texts."),
    (("/v1/score", "/score"), ScoreRequest, ScoreHandler, "Say how well texts go together."),
    (("/v1/rerank", "/rerank", "/v2/rerank"), RerankRequest, RerankHandler, "Put documents in order for a query."),
)


class PoolingRoutes:
    """The routes, for whoever keeps the others.

    Args:
        state: Where the server is in its life.
        models: The names it answers to.
        bodies: Reads requests.
    """

    def __init__(self, state: ServerState, models: OpenAIServingModels, bodies: BodyReader) -> None:
        self._state = state
        self._models = models
        self._bodies = bodies

    def add_routes(self, router: APIRouter) -> None:
        """Adds the routes."""
        for paths, kind, make_call, summary in _ROUTES:
            decoder: BodyDecoder[Any] = BodyDecoder(kind)
            for path in paths:
                router.add_api_route(
                    path,
                    self._endpoint(decoder, make_call),
                    methods=["POST"],
                    name=path,
                    summary=summary,
                    openapi_extra=request_body_schema(kind),
                )

    def _endpoint(self, decoder: BodyDecoder[Any], make_call: _HandlerFactory) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            return await self._answer(request, decoder, make_call)

        return answer

    async def _answer(self, request: Request, decoder: BodyDecoder[Any], make_call: _HandlerFactory) -> Response:
        engine = self._state.engine
        asked = await self._bodies.decode(request, decoder)
        call = make_call(engine, self._state.tokenizer_pool, self._models.resolve_name(asked.model), asked)
        self._state.request_started()
        try:
            async with cancel_on_disconnect(request.receive):
                await call.start()
                answer = await call.full_response()
            return Response(answer, media_type="application/json")
        finally:
            call.close()
            self._state.request_finished()

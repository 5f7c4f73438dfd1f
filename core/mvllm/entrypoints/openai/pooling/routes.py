"""The routes of requests that generate nothing: vectors, scores, and documents in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mvllm.engine.async_llm import AsyncLLM
from mvllm.entrypoints.openai.common.request_body import BodyDecoder, BodyReader
from mvllm.entrypoints.openai.pooling.serving_embedding import EmbeddingCall, PoolingCall
from mvllm.entrypoints.openai.common.openapi import body_of
from mvllm.entrypoints.openai.pooling.serving_base import PooledCall
from mvllm.entrypoints.openai.protocol import (
    ClassificationRequest,
    EmbeddingRequest,
    ModelRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from mvllm.entrypoints.openai.pooling.serving_score import ClassificationCall, RerankCall, ScoreCall
from mvllm.entrypoints.openai.common.serving_models import ServedModels
from mvllm.entrypoints.openai.server.server_state import ServerState
from mvllm.entrypoints.openai.common.streaming_response import while_connected
from mvllm.entrypoints.openai.common.tokenizer_pool import TextWork


class _MakeCall(Protocol):
    """A kind of call."""

    def __call__(self, engine: AsyncLLM, text_work: TextWork, model: str, request: Any) -> PooledCall:
        """One request."""


_ROUTES: tuple[tuple[tuple[str, ...], type[ModelRequest], _MakeCall, str], ...] = (
    (("/v1/embeddings",), EmbeddingRequest, EmbeddingCall, "Make vectors of texts."),
    (("/pooling",), PoolingRequest, PoolingCall, "Vectors, vectors of each token, or scores of texts."),
    (("/classify",), ClassificationRequest, ClassificationCall, "Classify texts."),
    (("/v1/score", "/score"), ScoreRequest, ScoreCall, "Say how well texts go together."),
    (("/v1/rerank", "/rerank", "/v2/rerank"), RerankRequest, RerankCall, "Put documents in order for a query."),
)


class PooledRoutes:
    """The routes, for whoever keeps the others.

    Args:
        state: Where the server is in its life.
        models: The names it answers to.
        bodies: Reads requests.
    """

    def __init__(self, state: ServerState, models: ServedModels, bodies: BodyReader) -> None:
        self._state = state
        self._models = models
        self._bodies = bodies

    def add_to(self, router: APIRouter) -> None:
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
                    openapi_extra=body_of(kind),
                )

    def _endpoint(self, decoder: BodyDecoder[Any], make_call: _MakeCall) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            return await self._answer(request, decoder, make_call)

        return answer

    async def _answer(self, request: Request, decoder: BodyDecoder[Any], make_call: _MakeCall) -> Response:
        engine = self._state.engine
        asked = await self._bodies.decode(request, decoder)
        call = make_call(engine, self._state.text_work, self._models.check(asked.model), asked)
        self._state.enter()
        try:
            async with while_connected(request.receive):
                await call.start()
                answer = await call.answer()
            return Response(answer, media_type="application/json")
        finally:
            call.close()
            self._state.leave()

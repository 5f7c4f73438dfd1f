"""Routes of the Ollama API: chat, generation, embeddings, and the served model. Nothing loads or changes a model."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from mvllm.extension_api import ModelConfig
from mvllm.extension_api.http import (
    APIRouter,
    APIServerHandle,
    RequestHandler,
    ServingContext,
    json_response,
    waited_nanoseconds,
    weights_size,
)
from mvllm_compat.ollama.embeddings import OllamaEmbedHandler, ollama_embeddings_handler
from mvllm_compat.ollama.generation import OllamaChatHandler, OllamaGenerateHandler, OllamaHandler, first_fields
from mvllm_compat.ollama.models import canonical_name, list_entry, running_entry, show_response
from mvllm_compat.ollama.protocol import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaRequest,
    OllamaShowRequest,
)
from mvllm_compat.ollama.response_types import (
    OllamaChatResponse,
    OllamaEmbeddingsResponse,
    OllamaEmbedResponse,
    OllamaGenerateResponse,
    OllamaModelList,
    OllamaRunningModelList,
    OllamaShowResponse,
    OllamaVersion,
)

R = TypeVar("R", bound=OllamaRequest)

OLLAMA_VERSION = "0.40.0"
"""The version of Ollama whose API these routes have; clients compare it with the one that they need."""

_TEXT = "The capital of France is Paris."
_QUESTION = "What is the capital of France?"
_OPTIONS = {"stream": False, "options": {"temperature": 0}}
_STREAMED = ("application/json", "application/x-ndjson")
_CHAT = {"messages": [{"role": "user", "content": _QUESTION}], **_OPTIONS}
_GENERATE = {"prompt": _QUESTION, **_OPTIONS}


class OllamaRoutes:
    """The routes.

    Args:
        server: The API server.
    """

    def __init__(self, server: APIServerHandle) -> None:
        self._server = server
        self._models = server.models
        self._body_routes = server.body_routes
        self._size: int | None = None

    def add_to(self, router: APIRouter) -> None:
        """Adds the routes to a router."""
        add = self._body_routes.add
        streamed = dict.fromkeys(_STREAMED, OllamaChatResponse)
        summary = "Generate the next message of a conversation."
        add(router, "/api/chat", OllamaChatRequest, self.chat, summary, _CHAT, response=streamed)
        lines = dict.fromkeys(_STREAMED, OllamaGenerateResponse)
        summary = "Answer or continue a prompt."
        add(router, "/api/generate", OllamaGenerateRequest, self.generate, summary, _GENERATE, response=lines)
        summary, example = "Embeddings of texts.", {"input": [_TEXT]}
        add(router, "/api/embed", OllamaEmbedRequest, self.embed, summary, example, response=OllamaEmbedResponse)
        add(
            router,
            "/api/embeddings",
            OllamaEmbeddingsRequest,
            self.embeddings,
            "The embedding of a text.",
            {"prompt": _TEXT},
            response=OllamaEmbeddingsResponse,
        )
        add(router, "/api/show", OllamaShowRequest, self.show, "Details of a model.", {}, response=OllamaShowResponse)
        get = router.add_api_route
        get("/api/tags", self.tags, summary="The models.", response=OllamaModelList)
        get("/api/ps", self.running_models, summary="The models that are loaded.", response=OllamaRunningModelList)
        get("/api/version", self.version, summary="The version of the API.", response=OllamaVersion)

    async def chat(self, request: Request) -> Response:
        """The next message of a conversation."""
        context, model, body = await self._decode(request, OllamaChatRequest)
        if not body.messages:
            return _loaded(body, model, {"message": {"role": "assistant", "content": ""}})
        return await self._run(request, OllamaChatHandler(context, model, body), model)

    async def generate(self, request: Request) -> Response:
        """The answer to a prompt."""
        context, model, body = await self._decode(request, OllamaGenerateRequest)
        if not body.prompt and not body.system and not body.images:
            return _loaded(body, model, {"response": ""})
        return await self._run(request, OllamaGenerateHandler(context, model, body), model)

    async def embed(self, request: Request) -> Response:
        """Embeddings of texts."""
        context, model, body = await self._decode(request, OllamaEmbedRequest, with_adapters=False)
        return await self._run(request, OllamaEmbedHandler(context, model, body), model)

    async def embeddings(self, request: Request) -> Response:
        """The embedding of a text."""
        context, model, body = await self._decode(request, OllamaEmbeddingsRequest, with_adapters=False)
        if not body.prompt:  # only loads the model
            return json_response({"embedding": []})
        return await self._run(request, ollama_embeddings_handler(context, model, body), model)

    async def show(self, request: Request) -> Response:
        """Details of a model."""
        context, model, body = await self._decode(request, OllamaShowRequest)
        if body.model is None:
            model = self._resolve(body.name, with_adapters=True)
        config = context.engine.model_config
        [card] = [card for card in self._models.model_cards(config.max_model_len) if card["id"] == model]
        template = await context.tokenizer_pool.run(context.prompt_renderer.template_text)
        return json_response(show_response(card, context, await self._weights_size(config), template))

    async def tags(self, request: Request) -> Response:
        """The models that requests may name."""
        engine = self._server.loaded_engine
        config = None if engine is None else engine.model_config
        size = 0 if config is None else await self._weights_size(config)
        cards = self._models.model_cards(None)
        return json_response({"models": [list_entry(card, config, size) for card in cards]})

    async def running_models(self, request: Request) -> Response:
        """The models that are loaded: all of them, or none while the server starts."""
        engine = self._server.loaded_engine
        if engine is None:
            return json_response({"models": []})
        size = await self._weights_size(engine.model_config)
        cards = self._models.model_cards(None)
        return json_response({"models": [running_entry(card, engine.model_config, size) for card in cards]})

    async def version(self, request: Request) -> Response:
        """The version of the API."""
        return json_response({"version": OLLAMA_VERSION})

    async def _decode(
        self, request: Request, body_type: type[R], *, with_adapters: bool = True
    ) -> tuple[ServingContext, str, R]:
        """What runs a request, the served name of its model, and its body. Raises as `BodyRoutes.decode_for_model`."""
        context = self._server.context
        body = await self._body_routes.decode(request, body_type)
        return context, self._resolve(body.model, with_adapters=with_adapters), body

    def _resolve(self, name: str | None, *, with_adapters: bool) -> str:
        return self._models.resolve_name(canonical_name(self._models, name), with_adapters=with_adapters)

    async def _run(self, request: Request, handler: RequestHandler, model: str) -> Response:
        if isinstance(handler, OllamaHandler | OllamaEmbedHandler):
            handler.durations.waited_ns = waited_nanoseconds(request.headers)
        return await self._body_routes.run(request, handler, model)

    async def _weights_size(self, config: ModelConfig) -> int:
        if self._size is None:
            self._size = await asyncio.to_thread(weights_size, config)
        return self._size


def _loaded(body: OllamaRequest, model: str, answer: dict[str, Any]) -> Response:
    """The response to a request without a prompt, by which clients load a model. It is loaded."""
    fields = first_fields(body.model or model)
    return json_response({**fields, **answer, "done": True, "done_reason": "load"})

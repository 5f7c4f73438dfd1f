"""Every route of the server, each a few lines: read, check, hand to whoever answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from mvllm.engine.async_llm import AsyncLLM
from mvllm.entrypoints.openai.admin.lora_routes import LoRARoutes
from mvllm.entrypoints.openai.chat.serving import ChatCompletionHandler
from mvllm.entrypoints.openai.common.errors import APIError
from mvllm.entrypoints.openai.common.openapi import request_body_schema
from mvllm.entrypoints.openai.common.request_body import BodyDecoder, BodyReader
from mvllm.entrypoints.openai.common.server_sent_events import encode_json
from mvllm.entrypoints.openai.common.serving_base import GenerationHandler
from mvllm.entrypoints.openai.common.serving_models import OpenAIServingModels
from mvllm.entrypoints.openai.common.streaming_response import EventStreamResponse, cancel_on_disconnect
from mvllm.entrypoints.openai.completions.serving import CompletionHandler
from mvllm.entrypoints.openai.pooling.routes import PoolingRoutes
from mvllm.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    ModelRequest,
    ResponsesRequest,
    TokenizeRequest,
    reject_unsupported_fields,
)
from mvllm.entrypoints.openai.responses.serving import ResponsesHandler
from mvllm.entrypoints.openai.responses.store import ResponseStore
from mvllm.entrypoints.openai.server.http_metrics import CONTENT_TYPE, HTTPMetrics
from mvllm.entrypoints.openai.server.middleware import request_caller, require_admin
from mvllm.entrypoints.openai.server.server_state import ServerPhase, ServerState
from mvllm.entrypoints.openai.server.settings import ServerSettings
from mvllm.errors import ConfigError, ModelError, PlatformError, RequestError
from mvllm.version import __version__

MAX_DETOKENIZE_TOKENS = 1 << 20
"""Token ids in one request to `/detokenize`: what is done with them holds everybody up."""


R = TypeVar("R", bound=ModelRequest)
Endpoint = Callable[[Request], Awaitable[Response]]


class Routes:
    """The routes and what they share.

    Args:
        state: Where the server is in its life.
        models: The names it answers to.
        metrics: What `/metrics` shows.
        settings: The server's.
    """

    def __init__(
        self, state: ServerState, models: OpenAIServingModels, metrics: HTTPMetrics, settings: ServerSettings
    ) -> None:
        self._state = state
        self._models = models
        self._metrics = metrics
        self._settings = settings
        self._bodies = BodyReader.from_settings(settings)
        self._decoders: dict[type[ModelRequest], BodyDecoder[Any]] = {}
        self._responses = ResponseStore(settings.max_stored_responses, settings.max_stored_bytes)

    def routers(self) -> list[APIRouter]:
        """All routes, with the tags of `openapi.TAGS`; those for administrators carry `admin`."""
        health = APIRouter(tags=["health"])
        for path in ("/health", "/health/live", "/ping"):
            health.add_api_route(path, self.health, methods=["GET"], summary="Whether the server works.")
            health.add_api_route(path, self.health, methods=["HEAD"], include_in_schema=False)
        health.add_api_route("/ping", self.health, methods=["POST"], summary="Whether the server works.")
        health.add_api_route("/health/ready", self.readiness, methods=["GET"], summary="Whether it takes requests.")
        health.add_api_route("/health/ready", self.readiness, methods=["HEAD"], include_in_schema=False)

        generation = APIRouter(tags=["generation"])
        writes = "Write the next message of a conversation."
        _add_post(generation, "/v1/chat/completions", self.chat_completions, ChatCompletionRequest, writes)
        _add_post(generation, "/v1/completions", self.completions, CompletionRequest, "Go on with a text.")
        turn = "Take the next turn of a conversation."
        _add_post(generation, "/v1/responses", self.create_response, ResponsesRequest, turn)
        one = "/v1/responses/{response_id}"
        generation.add_api_route(one, self.get_response, methods=["GET"], summary="A response that was given.")
        generation.add_api_route(one, self.delete_response, methods=["DELETE"], summary="Forget a response.")
        generation.add_api_route(f"{one}/cancel", self.cancel_response, methods=["POST"], summary="End a response.")

        embeddings = APIRouter(tags=["embeddings"])
        PoolingRoutes(self._state, self._models, self._bodies).add_routes(embeddings)

        models = APIRouter(tags=["models"])
        models.add_api_route("/v1/models", self.list_models, methods=["GET"], summary="The models.")
        models.add_api_route("/v1/models/{model_id:path}", self.get_model, methods=["GET"], summary="One model.")

        tokens = APIRouter(tags=["tokens"])
        ids = "Token ids of a text or a conversation."
        _add_post(tokens, "/tokenize", self.tokenize, TokenizeRequest, ids)
        _add_post(tokens, "/detokenize", self.detokenize, DetokenizeRequest, "The text of token ids.")

        monitoring = APIRouter(tags=["monitoring"])
        monitoring.add_api_route("/version", self.version, methods=["GET"], summary="The server's version.")
        monitoring.add_api_route("/load", self.load, methods=["GET"], summary="How busy the server is.")
        monitoring.add_api_route("/metrics", self.get_metrics, methods=["GET"], summary="Metrics for Prometheus.")

        admin = APIRouter(tags=["admin"])
        admin.add_api_route(
            "/reset_prefix_cache", self.reset_prefix_cache, methods=["POST"], summary="Forget cached prefixes."
        )
        admin.add_api_route("/sleep", self.sleep, methods=["POST"], summary="Give memory back and take no requests.")
        admin.add_api_route("/wake_up", self.wake_up, methods=["POST"], summary="Claim it and take requests again.")
        admin.add_api_route("/is_sleeping", self.is_sleeping, methods=["GET"], summary="Whether the engine sleeps.")
        LoRARoutes(self._state, self._models, self._settings, self._bodies).add_routes(admin)
        admin.add_api_route("/server_info", self.server_info, methods=["GET"], summary="What runs here.")
        return [health, generation, embeddings, models, tokens, monitoring, admin]

    def fast_routes(self) -> list[BaseRoute]:
        """The busiest routes once more, to be looked at first: without what FastAPI does for parameters and models of
        answers, as they have neither."""
        return [
            _FastRoute("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            _FastRoute("/v1/completions", self.completions, methods=["POST"]),
            _FastRoute("/v1/responses", self.create_response, methods=["POST"]),
        ]

    # --- health, from memory

    async def health(self) -> Response:
        """Whether the process, and the engine if it has been started, make progress."""
        reason = self._state.unhealthy_reason()
        return _json({"status": "ok"} if reason is None else {"status": reason}, 200 if reason is None else 503)

    async def readiness(self) -> Response:
        """Whether requests should come here."""
        reason = self._state.not_ready_reason()
        return _json({"status": "ok"} if reason is None else {"status": reason}, 200 if reason is None else 503)

    # --- the OpenAI API

    async def chat_completions(self, request: Request) -> Response:
        """The next message of a conversation."""

        def call(engine: AsyncLLM, model: str, asked: ChatCompletionRequest) -> GenerationHandler:
            return ChatCompletionHandler(engine, self._state.chat_prompt_renderer, model, asked)

        return await self._generate(request, ChatCompletionRequest, call)

    async def completions(self, request: Request) -> Response:
        """What follows a text."""

        def call(engine: AsyncLLM, model: str, asked: CompletionRequest) -> GenerationHandler:
            return CompletionHandler(engine, self._state.tokenizer_pool, model, asked)

        return await self._generate(request, CompletionRequest, call)

    async def create_response(self, request: Request) -> Response:
        """The next turn of a conversation."""

        def call(engine: AsyncLLM, model: str, asked: ResponsesRequest) -> GenerationHandler:
            caller = request_caller(request.scope)
            return ResponsesHandler(engine, self._state.chat_prompt_renderer, model, asked, self._responses, caller)

        return await self._generate(request, ResponsesRequest, call)

    async def get_response(self, request: Request, response_id: str, stream: bool = False) -> Response:
        """A response that was given, or is being written."""
        if stream:
            raise RequestError("stream is not possible here: ask for the response again later.", parameter="stream")
        return Response(self._responses.body(response_id, request_caller(request.scope)), media_type="application/json")

    async def delete_response(self, request: Request, response_id: str) -> Response:
        """Forgets a response."""
        self._responses.delete(response_id, request_caller(request.scope))
        return _json({"id": response_id, "object": "response", "deleted": True})

    async def cancel_response(self, request: Request, response_id: str) -> Response:
        """Ends a response that is being written."""
        body = self._responses.cancel(response_id, request_caller(request.scope))
        return Response(body, media_type="application/json")

    async def list_models(self) -> Response:
        """The names under which the model is offered."""
        return _json({"object": "list", "data": self._models.model_cards(self._max_model_len())})

    async def get_model(self, model_id: str) -> Response:
        """One of the names."""
        self._models.resolve_name(model_id, with_adapters=True)
        [card] = [card for card in self._models.model_cards(self._max_model_len()) if card["id"] == model_id]
        return _json(card)

    # --- beside it

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a conversation."""
        engine, _, asked = await self._decode_request(request, TokenizeRequest)
        if (asked.prompt is None) == (asked.messages is None):
            raise RequestError("Give either prompt or messages.", parameter="prompt")
        ids: list[int]
        async with cancel_on_disconnect(request.receive):
            if asked.prompt is None:
                ids = (await self._state.chat_prompt_renderer.render(asked))["prompt_token_ids"]
            else:
                special = asked.add_special_tokens is not False
                ids = await self._state.tokenizer_pool.encode(asked.prompt, add_special_tokens=special)
        names: list[str | None] | None = None
        if asked.return_token_strs:  # in a thread: they may be many
            names = await self._state.tokenizer_pool.run(lambda: [engine.tokenizer.token_name(i) for i in ids])
        answer: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": engine.model_config.max_model_len,
            "tokens": ids,
            "token_strs": names,
        }
        return _json(answer)

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        engine, _, asked = await self._decode_request(request, DetokenizeRequest)
        ids = asked.tokens
        if ids is None:
            raise RequestError("tokens is missing.", parameter="tokens")
        if len(ids) > MAX_DETOKENIZE_TOKENS:
            raise RequestError(
                f"tokens may have {MAX_DETOKENIZE_TOKENS} entries; found {len(ids)}. Send several requests.",
                parameter="tokens",
            )
        vocab_size = engine.model_config.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            raise RequestError(f"tokens must be token ids from 0 to {vocab_size - 1}.", parameter="tokens")
        text = await self._state.tokenizer_pool.run(lambda: engine.tokenizer.decode(ids, skip_special_tokens=False))
        return _json({"prompt": text})

    async def version(self) -> Response:
        """The version of mvllm."""
        return _json({"version": __version__})

    async def load(self) -> Response:
        """How busy the server is, now."""
        return _json(
            {"server_load": self._state.total_num_in_flight, "phase": self._state.phase.value, **self._engine_load()}
        )

    async def get_metrics(self) -> Response:
        """Everything counted since the start."""
        return Response(self._metrics.exposition(), media_type=CONTENT_TYPE)

    # --- administration

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Forgets cached prefixes; false where running requests still use some."""
        require_admin(request)
        self._bodies.check_query(request)
        return _json({"reset": await self._state.engine.reset_prefix_cache()})

    async def sleep(self, request: Request, level: int = 1) -> Response:
        """Puts the engine to sleep; requests under way are aborted."""
        require_admin(request)
        self._bodies.check_query(request, "level")
        engine = self._state.engine
        with _errors_shown_to_admin("sleep_failed"):
            await engine.sleep(level)
        return _json({"is_sleeping": engine.is_asleep})

    async def wake_up(self, request: Request, tags: Annotated[list[str] | None, Query()] = None) -> Response:
        """Wakes the engine up, or claims one of `weights` and `kv_cache` first."""
        require_admin(request)
        self._bodies.check_query(request, "tags")
        engine = self._state.engine
        with _errors_shown_to_admin("wake_up_failed"):
            await engine.wake_up(tags)
        return _json({"is_sleeping": engine.is_asleep})

    async def is_sleeping(self, request: Request) -> Response:
        """Whether the engine sleeps."""
        require_admin(request)
        return _json({"is_sleeping": self._state.engine.is_asleep})

    async def server_info(self, request: Request) -> Response:
        """What runs here."""
        require_admin(request)
        engine = self._state.loaded_engine
        model = None if engine is None else engine.model_config
        return _json(
            {
                "version": __version__,
                "phase": self._state.phase.value,
                "http_plugins": list(self._settings.http_plugins),
                "platform": None if engine is None else engine.platform_summary,
                "model": None
                if model is None
                else {
                    "model": model.model,
                    "architecture": model.architecture,
                    "dtype": model.dtype,
                    "max_model_len": model.max_model_len,
                    "quantization": model.quantization,
                },
            }
        )

    # --- what they share

    async def _decode_request(self, request: Request, kind: type[R]) -> tuple[AsyncLLM, str, R]:
        """What answers a request, under which model's name, and the request itself.

        Raises:
            APIError: Nobody does now, or the body is not acceptable.
            RequestError: It has a field that is not supported.
        """
        engine = self._state.engine
        decoder = self._decoders.get(kind)
        if decoder is None:
            decoder = self._decoders[kind] = BodyDecoder(kind)
        asked: R = await self._bodies.decode(request, decoder)
        reject_unsupported_fields(asked)
        return engine, self._models.resolve_name(asked.model, with_adapters=True), asked

    async def _generate(
        self, request: Request, kind: type[R], make_call: Callable[[AsyncLLM, str, R], GenerationHandler]
    ) -> Response:
        engine, model, asked = await self._decode_request(request, kind)
        call = make_call(engine, model, asked)
        call.lora_request = self._models.lora_request(model)
        self._state.request_started()

        def end() -> None:
            call.close()
            self._state.request_finished()

        streams = False
        try:
            if getattr(asked, "stream", None):
                async with cancel_on_disconnect(request.receive):
                    await call.start()
                streams = True
                return EventStreamResponse(call.stream(), self._settings.send_timeout, end)  # which notices who leaves
            async with cancel_on_disconnect(request.receive):
                await call.start()
                answer = await call.full_response()
            return Response(answer, media_type="application/json")
        finally:
            if not streams:
                end()

    def _max_model_len(self) -> int | None:
        engine = self._state.loaded_engine
        return None if engine is None else engine.model_config.max_model_len

    def _engine_load(self) -> dict[str, Any]:
        engine = self._state.loaded_engine
        if engine is None or self._state.phase is ServerPhase.DEAD:
            return {}
        load = engine.load
        return {
            "num_requests_running": load.num_running,
            "num_requests_waiting": load.num_waiting,
            "kv_cache_usage": load.kv_cache_usage,
            "prompt_tokens_per_second": load.prompt_tokens_per_second,
            "generation_tokens_per_second": load.generation_tokens_per_second,
        }


def _add_post(router: APIRouter, path: str, endpoint: Endpoint, kind: type[msgspec.Struct], summary: str) -> None:
    """Adds a route whose body is a struct of type `kind`."""
    router.add_api_route(path, endpoint, methods=["POST"], summary=summary, openapi_extra=request_body_schema(kind))


class _FastRoute(Route):
    """A route that says which one it is, as FastAPI's do. Other methods than its own are for the routes behind it."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, found = super().matches(scope)
        if match is not Match.FULL:
            return Match.NONE, {}
        return match, {**found, "route": self}


@contextmanager
def _errors_shown_to_admin(code: str) -> Iterator[None]:
    """Errors of the machine's, which others only see in the log."""
    try:
        yield
    except (ConfigError, ModelError, PlatformError) as e:
        raise APIError(503, str(e), code=code, retry_after=1) from e


def _json(value: dict[str, Any], status: int = 200) -> Response:
    return Response(encode_json(value), status, media_type="application/json")

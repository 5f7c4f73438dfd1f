"""HTTP plugins under `/plugins/<name>`: packages that add routes to the server if they are named.

    mvllm.http      greeting = my_package.routes:make_router          make_router(server: HTTPServerHandle) -> Router
    --http-plugins greeting                                           its routes are under /plugins/greeting

A plugin's routes are a separate application, mounted under the plugin's prefix, so they cannot shadow the server's
routes. RequestMiddleware (authentication, request ids, log), limits of bodies and error format apply to them. If a
plugin cannot be loaded, its routes answer 503, and the server runs without it. `root_routes.py` has plugins whose
routes are at the root.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mvllm import plugin_groups
from mvllm.engine.frontend.outputs import RequestOutput
from mvllm.entrypoints.openai.common.api_format import error_response
from mvllm.entrypoints.openai.common.engine_requests import EngineRequests
from mvllm.entrypoints.openai.common.errors import APIError, to_api_error
from mvllm.entrypoints.openai.common.json_response import encode_json
from mvllm.entrypoints.openai.common.request_body import BodyDecoder, BodyReader
from mvllm.entrypoints.openai.common.server_sent_events import DONE, error_event
from mvllm.entrypoints.openai.common.serving_models import OpenAIServingModels
from mvllm.entrypoints.openai.common.streaming_response import EventStreamResponse, cancel_on_disconnect
from mvllm.entrypoints.openai.server.error_handlers import make_application
from mvllm.entrypoints.openai.server.fastapi_routers import routes_of
from mvllm.entrypoints.openai.server.rate_limits import current_request
from mvllm.entrypoints.openai.server.server_state import ServerState
from mvllm.entrypoints.openai.server.settings import ServerSettings
from mvllm.errors import ConfigError
from mvllm.logging import get_logger
from mvllm.messages.inputs import PromptType
from mvllm.messages.sampling_params import RequestOutputKind, SamplingParams
from mvllm.plugin_groups import PluginSource

logger = get_logger(__name__)

PREFIX = "/plugins"
T = TypeVar("T", bound=msgspec.Struct)


class HTTPServerHandle:
    """A plugin's access to the server. Before the model is loaded, methods that need it raise 503.

    Args:
        name: The plugin's name.
        state, models, settings: The server's.
    """

    def __init__(self, name: str, state: ServerState, models: OpenAIServingModels, settings: ServerSettings) -> None:
        self._name = name
        self._state = state
        self._models = models
        self._send_timeout = settings.send_timeout
        self._bodies = BodyReader.from_settings(settings)

    @property
    def model_name(self) -> str:
        """The model's name in responses."""
        return self._models.name

    @property
    def max_model_len(self) -> int:
        """Longest sequence of the model, in tokens.

        Raises:
            APIError: The server does not accept requests (503). The other methods raise it, too.
        """
        return self._state.engine.model_config.max_model_len

    async def read(self, request: Request, kind: type[T]) -> T:
        """The body of a request, JSON, as a struct of type `kind`.

        Raises:
            APIError: The body is too long, is not JSON, or does not match the struct.
        """
        return await self._bodies.decode(request, BodyDecoder(kind))

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text.

        Raises:
            RequestError: The text is too long for the model.
        """
        return await self._state.context.tokenizer_pool.encode(text, add_special_tokens=add_special_tokens)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        tokenizer, ids = self._state.engine.tokenizer, list(token_ids)
        return await self._state.context.tokenizer_pool.run(lambda: tokenizer.decode(ids, skip_special_tokens=False))

    async def complete(
        self, request: Request, prompts: Sequence[PromptType], params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """The final outputs of prompts. A disconnect of the client aborts them.

        Args:
            request: The HTTP request; its body has been read.
            prompts: As for `LLM.generate`.
            params: Sampling parameters; by default the model's.

        Raises:
            RequestError: A prompt or a setting is not acceptable.
            UnavailableError: The engine does not accept more requests now.
        """
        with self._in_flight():
            generation: EngineRequests | None = None
            try:
                async with cancel_on_disconnect(request.receive):
                    generation = await self._start(prompts, params, RequestOutputKind.FINAL_ONLY)
                    return await generation.collect()
            finally:
                if generation is not None:
                    _end(generation)

    async def generate(
        self, prompt: PromptType, params: SamplingParams | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a prompt as they are generated, each with new text. Closing the generator aborts the request.

        Raises:
            As `complete`.
        """
        with self._in_flight():
            generation = await self._start([prompt], params, RequestOutputKind.DELTA)
            try:
                async for _, output in generation.outputs():
                    for sequence in output.outputs:
                        if sequence.finish_reason == "error":
                            raise generation.error_of(sequence)
                    yield output
            finally:
                _end(generation)

    async def stream(self, request: Request, values: AsyncGenerator[Any, None]) -> Response:
        """A response of server-sent events: one for each value, as JSON, and `[DONE]`.

        Returns when there is a first value, so that an error before it becomes an error response. `values` is closed at
        the end, also if the client disconnects.
        """
        try:
            async with cancel_on_disconnect(request.receive):
                first = [await anext(values)]
        except StopAsyncIteration:
            first = []
        except BaseException:
            await values.aclose()
            raise
        return EventStreamResponse(_events(first, values), self._send_timeout)

    async def _start(
        self, prompts: Sequence[PromptType], params: SamplingParams | None, kind: RequestOutputKind
    ) -> EngineRequests:
        engine = self._state.engine
        chosen = SamplingParams(**engine.model_config.generation_defaults) if params is None else params
        chosen = msgspec.structs.replace(chosen, output_kind=kind)
        return await EngineRequests.start(engine, f"{self._name}-{uuid.uuid4().hex}", prompts, chosen)

    @contextlib.contextmanager
    def _in_flight(self) -> Any:
        """Counts a request as in flight: the server's shutdown waits for it."""
        self._state.engine  # noqa: B018  (raises if no requests are accepted)
        self._state.request_started()
        try:
            yield
        finally:
            self._state.request_finished()


@dataclass(frozen=True)
class LoadedPlugin:
    """A plugin's application, or the reason why it could not be loaded.

    Attributes:
        name: The plugin's name.
        source: The package that has it.
        app: The application, to be mounted at `prefix`; None if loading failed.
        error: Why loading failed.
    """

    name: str
    source: PluginSource
    app: Starlette | None
    error: str | None = None

    @property
    def prefix(self) -> str:
        """The beginning of its paths."""
        return f"{PREFIX}/{self.name}"

    def asgi_app(self, bodies: BodyReader) -> ASGIApp:
        """The application to mount, with the server's limits of bodies."""
        return _unavailable(self.name) if self.app is None else _BodyLimitMiddleware(self.app, self.prefix, bodies)


def load_http_plugins(names: Sequence[str], make_handle: Callable[[str], HTTPServerHandle]) -> list[LoadedPlugin]:
    """Loads plugins. The error of one that fails is logged.

    Args:
        make_handle: Makes the handle that a plugin gets.

    Raises:
        ConfigError: No package has a plugin of a name, or it is not allowed.
    """
    return [_load(name, make_handle) for name in dict.fromkeys(names)]


def _load(name: str, make_handle: Callable[[str], HTTPServerHandle]) -> LoadedPlugin:
    source = plugin_groups.require(plugin_groups.HTTP, name)
    try:
        make_router = plugin_groups.load(plugin_groups.HTTP, source)
        router = make_router(make_handle(name))
        if not isinstance(router, Router):
            raise ConfigError(f"it returned {type(router).__name__}, not a Router of Starlette or FastAPI")
        app = make_application(routes_of(router))
    except KeyboardInterrupt:
        raise
    except BaseException as e:
        error = f"{type(e).__name__}: {e}"
        logger.error("The HTTP plugin %s of %s could not be loaded; its routes answer 503.", name, source, exc_info=e)
        return LoadedPlugin(name, source, None, error)
    return LoadedPlugin(name, source, app)


class _BodyLimitMiddleware:
    def __init__(self, app: ASGIApp, prefix: str, bodies: BodyReader) -> None:
        self._app = app
        self._route = SimpleNamespace(path=f"{prefix}/...")
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limited = self._bodies.limit_receive(receive)

        async def receive_limited() -> Message:
            try:
                return await limited()
            except APIError as e:  # FastAPI turns other exceptions into 400
                raise HTTPException(e.status, e.message) from e

        try:
            await self._app(scope, receive_limited, send)
        finally:
            scope["route"] = self._route  # so that metrics have one series per plugin


def _unavailable(name: str) -> ASGIApp:
    """The application of a plugin that could not be loaded: it answers 503."""
    error = APIError(503, f"The plugin {name} could not be loaded; see the server's log.", code="plugin_failed")

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await error_response(error)(scope, receive, send)

    return answer


def _end(generation: EngineRequests) -> None:
    """Ends the requests of a plugin, and counts their tokens for the key of the HTTP request."""
    if (counted := current_request()) is not None:
        counted.add_tokens(generation.num_tokens)
    generation.close()


async def _events(first: Sequence[Any], values: AsyncGenerator[Any, None]) -> AsyncGenerator[bytes, None]:
    try:
        for value in first:
            yield b"data: " + encode_json(value) + b"\n\n"
        async for value in values:
            yield b"data: " + encode_json(value) + b"\n\n"
    except Exception as e:  # noqa: BLE001  (to_api_error logs it)
        yield error_event(to_api_error(e))
    else:
        yield DONE
    finally:
        await values.aclose()

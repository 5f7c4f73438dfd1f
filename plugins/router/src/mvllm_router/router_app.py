"""The router's ASGI application: finds the model of a request, has it loaded, and forwards the request to its server.

The model is named by the field `model` of the body, or by the query parameter `model` for routes without such a body
(`/metrics?model=NAME`). Routes that concern all models are answered here; see ModelRoutes.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl, urlencode

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Message, Receive, Scope, Send

from mvllm.extension_api import APIError
from mvllm.extension_api.server import (
    CLIENT_CLOSED_REQUEST,
    LOAD_HEADER,
    BodyDecoder,
    BodyReader,
    ClientDisconnected,
    ServerSettings,
    cancel_on_disconnect,
    loaded_plugins,
)
from mvllm_router.model_catalog import ModelCatalog
from mvllm_router.model_entry import parse_keep_alive
from mvllm_router.model_pool import ModelPool
from mvllm_router.model_server import ModelServerProcess
from mvllm_router.pooled_model import KeepAlive, PooledModel, shutting_down_error
from mvllm_router.proxy import Proxy

ONE_MODEL_PREFIX = "/v1/models/"
"""Of the path that ends with a model's name."""

Endpoint = Callable[[Request], Awaitable[Response]]

_OF_ALL_OR_ONE = ("/metrics", "/load", "/server_info")
"""Own routes that are forwarded if the query names a model."""
_OF_A_LOADED_MODEL = ("/sleep", "/wake_up", "/reset_mm_cache", "/reset_prefix_cache")
_LORA_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_STORED = ("/v1/responses/", "/v1/chat/completions/")
"""Beginnings of paths with the id of a stored response or chat completion."""
_WITHOUT_ID = ("/v1/responses/input_tokens", "/v1/responses/compact")
_COMPLETIONS = "/v1/chat/completions"
_PLUGINS = "/plugins/"
_EMPTY = (b"", b"null", b'""', b"[]")


class RoutingFields(msgspec.Struct):
    """The fields of a body that the router reads; the model server checks all of them.

    Attributes:
        model: The model's name.
        keep_alive: Ollama's time to keep the model loaded.
        prompt, messages, system, images: Of Ollama's requests; without any, the request only loads the model.
        lora_name: The name of an adapter to load.
    """

    model: str | None = None
    keep_alive: Any = None
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    images: msgspec.Raw = msgspec.Raw()
    lora_name: str | None = None

    @property
    def has_content(self) -> bool:
        return any(bytes(each) not in _EMPTY for each in (self.prompt, self.messages, self.system, self.images))


class RouterApp:
    """The application.

    Args:
        pool: The models.
        catalog: Finds models by name.
        settings: The server's.
        fallback: An API server's application without an engine: it has the routes that are forwarded, and answers
            those that need no model, such as `/docs`, or stored responses in a file.
        own_routes: The router's own, by method and path.

    Attributes:
        is_draining: Whether new requests to models are refused, because the server shuts down.
    """

    def __init__(
        self,
        pool: ModelPool,
        catalog: ModelCatalog,
        settings: ServerSettings,
        fallback: Starlette,
        own_routes: Mapping[tuple[str, str], Endpoint],
    ) -> None:
        self.is_draining = False
        self._pool = pool
        self._catalog = catalog
        self._settings = settings
        self._plugins = [plugin for _, plugin in loaded_plugins(settings.disabled_http_plugins)]
        self._fallback = fallback
        self._proxy = Proxy(settings.send_timeout)
        self._reader = BodyReader.from_settings(settings)
        self._decoder = BodyDecoder(RoutingFields)
        routes = list(fallback.routes)
        self._forwarded = {
            (method, route.path): route
            for route in routes
            if isinstance(route, Route) and not route.param_convertors
            for method in route.methods or ()
        }
        self._forwarded_patterns = [route for route in routes if not isinstance(route, Route) or route.param_convertors]
        self._own_routes = {  # model servers may be without Ollama's API
            key: endpoint
            for key, endpoint in own_routes.items()
            if not key[1].startswith("/api/") or key in self._forwarded
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        has_started = False

        async def send_noting_start(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        request = Request(scope, receive, send)
        try:
            await self._serve(request, scope, receive, send_noting_start)
        except ClientDisconnected:
            if not has_started:
                await Response(status_code=CLIENT_CLOSED_REQUEST)(scope, receive, send)

    async def _serve(self, request: Request, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        query = _model_in_query(scope)
        own = self._own_routes.get((method, ONE_MODEL_PREFIX if path.startswith(ONE_MODEL_PREFIX) else path))
        if own is not None and (query is None or path not in _OF_ALL_OR_ONE):
            scope["route"] = OwnRoute("/v1/models/{model_id:path}" if path.startswith(ONE_MODEL_PREFIX) else path)
            await (await own(request))(scope, receive, send)
            return
        route = self._forwarded.get((method, path)) or self._find_route(scope)
        if route is None or (path in NO_MODEL_PATHS and query is None) or not self._needs_model(method, path):
            await self._fallback(scope, receive, send)
            return
        if self.is_draining:
            raise shutting_down_error()
        scope["route"] = route
        await self._forward(request, query, send)

    def _needs_model(self, method: str, path: str) -> bool:
        """Whether a model has to be loaded, which it does not for what all models share, such as a store in a file."""
        return all(plugin.needs_model(self._settings, method, path) for plugin in self._plugins)

    def _find_route(self, scope: Scope) -> BaseRoute | OwnRoute | None:
        if scope["path"].startswith(_PLUGINS):
            return OwnRoute(_PLUGINS.rstrip("/"))
        for route in self._forwarded_patterns:
            if route.matches(scope)[0] is Match.FULL:
                return route
        return None

    # --- requests to models

    async def _forward(self, request: Request, name: str | None, send: Send) -> None:
        scope, receive = request.scope, request.receive
        path, query = scope["path"], _query_without_model(scope)
        fields = RoutingFields()
        if name is not None:
            body = await self._reader.read_any(request)
        elif _has_id(path):
            body, name = await self._reader.read_any(request), await self._model_with_response(scope)
        elif scope["method"] in ("POST", "PUT", "PATCH"):
            body = await self._reader.read(request)
            fields = self._decoder.decode(body)
            name = fields.model
        else:
            body = b""
        model = await self._catalog.resolve(name, path)
        self._check_lora_name(model, path, fields)
        if not model.is_loaded and (scope["method"] in ("GET", "DELETE") or path in _OF_A_LOADED_MODEL):
            raise APIError(
                503,
                f"The model `{model.entry.name}` is not loaded, and this request does not load it.",
                code="not_loaded",
                retry_after=10,
            )
        keep_alive = _keep_alive(path, fields)
        if keep_alive == 0 and path in ("/api/generate", "/api/chat") and not fields.has_content:
            if (response := await self._unload(model, path)) is not None:
                await response(scope, receive, send)
                return

        async def send_with_names(message: Message) -> None:
            """Learns the names of adapters before the client knows that they can be used."""
            if message["type"] == "http.response.start" and message["status"] == HTTPStatus.OK:
                await self._catalog.refresh_adapters(model)
            await send(message)

        arrival = time.monotonic_ns()
        async with cancel_on_disconnect(receive), self._pool.use(model, len(body), keep_alive) as server:
            assert isinstance(server, ModelServerProcess)
            if path.startswith("/api/"):
                waited = LOAD_HEADER, b"%d" % (time.monotonic_ns() - arrival)
                scope = {
                    **scope,
                    "headers": [each for each in scope["headers"] if each[0] != LOAD_HEADER] + [waited],
                }
            sending = send_with_names if path in _LORA_PATHS else send
            await self._proxy.forward(server.client, scope, sending, body, query)

    async def _model_with_response(self, scope: Scope) -> str:
        """The name of the model that has stored a response or a chat completion of the client's key.

        Raises:
            APIError: None has it (404).
        """
        path, headers = scope["path"], scope["headers"]
        path = "/".join(path.split("/")[: 5 if path.startswith(_COMPLETIONS) else 4])
        for model in self._pool.loaded():
            server = model.server
            if isinstance(server, ModelServerProcess) and await server.client.fetch(path, headers=headers):
                return model.entry.name
        raise APIError(
            404,
            "No loaded model has stored this response. Models lose them when they are unloaded, unless the server is "
            "started with --responses-store.",
            code="not_found",
        )

    def _check_lora_name(self, model: PooledModel, path: str, fields: RoutingFields) -> None:
        if path != _LORA_PATHS[0] or fields.lora_name is None:
            return
        other = self._pool.find(fields.lora_name)
        if other is not None and other is not model:
            raise APIError(
                400,
                f"The name `{ascii(fields.lora_name[:100])[1:-1]}` is in use by another model. Choose another name.",
                param="lora_name",
            )

    async def _unload(self, model: PooledModel, path: str) -> Response | None:
        """Ollama's request to unload a model: without content, and with `keep_alive` 0. None for pinned models.

        It needs no administrator, so others' requests do not wait for it.
        """
        if model.entry.is_pinned:
            return None
        await self._pool.unload_when_idle(model)
        return self._catalog.unloaded_response(model, is_chat=path == "/api/chat")


def _has_id(path: str) -> bool:
    """Whether the path has the id of a stored response or chat completion."""
    return path.startswith(_STORED) and path not in _WITHOUT_ID


class OwnRoute:
    """What the log and the metrics read of a route."""

    def __init__(self, path: str) -> None:
        self.path = path


NO_MODEL_PATHS = frozenset({"/", "/docs", "/openapi.json", "/version", "/api/version", "/v1/responses/compact"})
"""Paths that the fallback answers."""


def _keep_alive(path: str, fields: RoutingFields) -> float | KeepAlive | None:
    if fields.keep_alive is None or not path.startswith("/api/"):
        return KeepAlive.OF_ENTRY
    try:
        return parse_keep_alive(fields.keep_alive)
    except ValueError as e:
        raise APIError(400, f"keep_alive {e}.", param="keep_alive") from None


def _query(scope: Scope) -> list[tuple[str, str]]:
    return parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)


def _model_in_query(scope: Scope) -> str | None:
    if b"model=" not in scope["query_string"]:
        return None
    return next((value for name, value in _query(scope) if name == "model"), None)


def _query_without_model(scope: Scope) -> bytes:
    query: bytes = scope["query_string"]
    if b"model=" not in query:
        return query
    return urlencode([(name, value) for name, value in _query(scope) if name != "model"]).encode()

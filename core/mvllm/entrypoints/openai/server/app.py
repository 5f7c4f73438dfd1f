"""Builds the server's ASGI application: routes, plugins, error handlers and middleware."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from mvllm import plugin_groups
from mvllm.engine.metrics.tracing import Tracer
from mvllm.entrypoints.openai.common.api_format import error_response
from mvllm.entrypoints.openai.common.errors import APIError, to_api_error
from mvllm.entrypoints.openai.common.openapi import openapi_document
from mvllm.entrypoints.openai.common.relaxation_header import RELAXATIONS_HEADER
from mvllm.entrypoints.openai.common.serving_models import OpenAIServingModels
from mvllm.entrypoints.openai.common.streaming_response import CLIENT_CLOSED_REQUEST, ClientDisconnected
from mvllm.entrypoints.openai.common.unknown_fields import UNKNOWN_FIELDS_HEADER
from mvllm.entrypoints.openai.server.authentication import APIKeys
from mvllm.entrypoints.openai.server.body_routes import BodyRoutes
from mvllm.entrypoints.openai.server.browser_requests import BrowserCheck
from mvllm.entrypoints.openai.server.http_metrics import HTTPMetrics
from mvllm.entrypoints.openai.server.http_plugins import HTTPServerHandle, load_http_plugins
from mvllm.entrypoints.openai.server.middleware import RequestMiddleware
from mvllm.entrypoints.openai.server.rate_limits import RateLimiter
from mvllm.entrypoints.openai.server.root_routes import PluginRoutes
from mvllm.entrypoints.openai.server.routes import Routes
from mvllm.entrypoints.openai.server.server_state import ServerState
from mvllm.entrypoints.openai.server.settings import ServerSettings
from mvllm.entrypoints.openai.server.tracing_middleware import TracingMiddleware
from mvllm.entrypoints.openai.server.web_pages import docs_page, playground_page
from mvllm.entrypoints.root_plugins import (
    api_formats,
    is_root_plugin,
    log_failures,
    missing_part_of,
    root_plugins,
)
from mvllm.errors import MvllmError
from mvllm.version import __version__

_RUNNING = "mvllm is running"
"""What programs get at `/`, unless a plugin has another text."""


def build_app(
    state: ServerState,
    models: OpenAIServingModels,
    metrics: HTTPMetrics,
    settings: ServerSettings,
    tracer: Tracer | None = None,
    rate_limiter: RateLimiter | None = None,
    listener: socket.socket | None = None,
) -> ASGIApp:
    """The application with all middleware.

    Args:
        listener: What it is to be served on; None if the application is called otherwise.
    """
    routes, added = _make_routes(state, models, metrics, settings)
    direct = [*routes.direct_routes, *added.direct_routes]
    app: ASGIApp = DirectRoutes(_build_fastapi_app(state, models, settings, routes, added), direct)
    if tracer is not None:
        operations = {path: name for plugin in added.plugins for path, name in plugin.operations.items()}
        app = TracingMiddleware(app, tracer, operations)
    return add_middleware(app, metrics, settings, rate_limiter, BrowserCheck.create(settings, listener))


def add_middleware(
    app: ASGIApp,
    metrics: HTTPMetrics,
    settings: ServerSettings,
    rate_limiter: RateLimiter | None = None,
    browser_check: BrowserCheck | None = None,
) -> ASGIApp:
    """An application with the middleware of every request."""
    own = () if settings.router_key is None else (settings.router_key,)
    keys = APIKeys(settings.api_keys, (*settings.admin_api_keys, *own))
    formats = api_formats(settings.disabled_http_plugins)
    app = RequestMiddleware(
        app, keys, metrics.observe, rate_limiter, browser_check, formats, access_log=settings.access_log
    )
    if settings.allowed_origins:
        # Outermost: preflight requests of browsers have no key.
        app = CORSMiddleware(
            app,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", UNKNOWN_FIELDS_HEADER, RELAXATIONS_HEADER],
        )
    return app


def build_fastapi_app(
    state: ServerState,
    models: OpenAIServingModels,
    metrics: HTTPMetrics,
    settings: ServerSettings,
) -> FastAPI:
    """The application without middleware."""
    return _build_fastapi_app(state, models, settings, *_make_routes(state, models, metrics, settings))


def build_app_without_engine(settings: ServerSettings) -> tuple[FastAPI, Callable[[], Awaitable[None]]]:
    """An API server's application without an engine, and a function that ends what it uses.

    It has all routes, for the description of the API and to find out whether there is a route; those that need an
    engine answer 503. HTTP plugins and adapters of the settings are left out.
    """
    state = ServerState(settings.heartbeat_timeout)
    plain = replace(settings, http_plugins=(), lora_modules=())
    models = OpenAIServingModels(("model",), "model")
    return build_fastapi_app(state, models, HTTPMetrics(CollectorRegistry()), plain), state.close


class DirectRoutes:
    """Answers requests to the most used routes, and passes others on to the application.

    These routes use nothing of the application's layers, each of which takes time for every request, and again whenever
    its task waits. Errors become the same responses.

    Args:
        app: The application.
        routes: POST routes without parameters in their paths.
    """

    def __init__(self, app: ASGIApp, routes: Iterable[Route]) -> None:
        self._app = app
        self._routes = {route.path: route for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        route = self._routes.get(scope["path"]) if scope["method"] == "POST" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        request = Request(scope, receive, send)
        try:
            response: Response = await route.endpoint(request)
        except ClientDisconnected as e:
            response = await _handle_client_disconnect(request, e)
        except Exception as e:  # noqa: BLE001  (to_api_error logs it)
            response = await _handle_error(request, e)
        await response(scope, receive, send)


def _make_routes(
    state: ServerState,
    models: OpenAIServingModels,
    metrics: HTTPMetrics,
    settings: ServerSettings,
) -> tuple[Routes, PluginRoutes]:
    body_routes = BodyRoutes(state, models, settings)
    log_failures(root_plugins(settings.disabled_http_plugins, settings.http_plugins))
    added = PluginRoutes(state, models, settings, body_routes)
    routes = Routes(state, models, metrics, settings, body_routes, added.store_completion)
    added.check_conflicts(routes.routers)
    return routes, added


def _build_fastapi_app(
    state: ServerState, models: OpenAIServingModels, settings: ServerSettings, routes: Routes, added: PluginRoutes
) -> FastAPI:
    app = FastAPI(
        title="mvllm",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json" if settings.docs else None,
        redirect_slashes=False,  # a redirect would contain the Host header that the client sent
    )
    plugins = load_http_plugins(
        [name for name in settings.http_plugins if not is_root_plugin(plugin_groups.require(plugin_groups.HTTP, name))],
        lambda name: HTTPServerHandle(name, state, models, settings),
        lambda: _add_handlers(FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)),
    )
    for router in (*routes.routers, *added.routers):
        app.include_router(router)
    for plugin in plugins:
        app.mount(plugin.prefix, plugin.asgi_app(routes.body_reader))
    parts = {plugin.prefix: plugin.app for plugin in plugins if plugin.app is not None}
    formats = api_formats(settings.disabled_http_plugins)
    tags = {name: text for plugin in added.plugins for name, text in plugin.tags.items()}
    app.openapi = lambda: openapi_document(app, parts, routes.body_types, formats, tags)  # type: ignore[method-assign]
    if settings.docs:

        async def docs() -> HTMLResponse:
            return docs_page(app.openapi())

        app.add_api_route("/docs", docs, methods=["GET"], include_in_schema=False)

    text = next((plugin.root_text for plugin in added.plugins if plugin.root_text is not None), _RUNNING)

    async def root(request: Request) -> Response:
        accepts_pages = "text/html" in request.headers.get("accept", "")
        return playground_page() if settings.docs and accepts_pages else PlainTextResponse(text)

    app.add_api_route("/", root, methods=["GET"], include_in_schema=False)
    return _add_handlers(app)


def _add_handlers(app: FastAPI) -> FastAPI:
    """Adds handlers that turn exceptions into error responses."""
    app.add_exception_handler(ClientDisconnected, _handle_client_disconnect)
    for kind in (APIError, MvllmError, Exception):
        app.add_exception_handler(kind, _handle_error)
    app.add_exception_handler(HTTPException, _handle_http_exception)
    app.add_exception_handler(RequestValidationError, _handle_validation_error)
    return app


async def _handle_client_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _handle_error(request: Request, error: Exception) -> Response:
    return error_response(to_api_error(error), request.scope)


async def _handle_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, APIError):  # it has more fields, such as `close`
        return error_response(error.__cause__, request.scope)
    if error.status_code == 404 and error.detail == "Not Found":  # a plugin's 404 has another text
        refused = APIError(404, "There is no route at this path.", code="unknown_path")
        if (missing := missing_part_of(request.scope["path"])) is not None:
            refused = APIError(404, missing, code="not_installed")
        return error_response(refused, request.scope)
    if error.status_code == 405:
        refused = APIError(405, "This path does not accept this method.", code="method_not_allowed")
        response = error_response(refused, request.scope)
        response.headers.update(error.headers or {})
        return response
    return error_response(APIError(error.status_code, str(error.detail)), request.scope)


async def _handle_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    name = str(error.errors()[0]["loc"][-1])
    refused = APIError(400, f"The value of the parameter {name[:40]!a} is not valid.", param=name[:40])
    return error_response(refused, request.scope)

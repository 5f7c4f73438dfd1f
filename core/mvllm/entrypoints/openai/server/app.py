"""Builds the server's ASGI application: routes, plugins, error handlers and middleware."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from mvllm import plugin_groups
from mvllm.engine.metrics.tracing import Tracer
from mvllm.entrypoints.openai.common.api_router import APIRoute, APIRouter
from mvllm.entrypoints.openai.common.openapi import openapi_document
from mvllm.entrypoints.openai.common.relaxation_header import RELAXATIONS_HEADER
from mvllm.entrypoints.openai.common.serving_models import OpenAIServingModels
from mvllm.entrypoints.openai.common.streaming_response import ClientDisconnected
from mvllm.entrypoints.openai.common.unknown_fields import UNKNOWN_FIELDS_HEADER
from mvllm.entrypoints.openai.server.authentication import APIKeys
from mvllm.entrypoints.openai.server.body_routes import BodyRoutes
from mvllm.entrypoints.openai.server.browser_requests import BrowserCheck
from mvllm.entrypoints.openai.server.error_handlers import handle_client_disconnect, handle_error, make_application
from mvllm.entrypoints.openai.server.fastapi_routers import routes_of
from mvllm.entrypoints.openai.server.http_metrics import HTTPMetrics
from mvllm.entrypoints.openai.server.http_plugins import HTTPServerHandle, load_http_plugins
from mvllm.entrypoints.openai.server.middleware import UNAUTHENTICATED_PATHS, RequestMiddleware
from mvllm.entrypoints.openai.server.rate_limits import RateLimiter
from mvllm.entrypoints.openai.server.root_routes import PluginRoutes
from mvllm.entrypoints.openai.server.routes import Routes
from mvllm.entrypoints.openai.server.server_handle import APIServerHandle
from mvllm.entrypoints.openai.server.server_state import ServerState
from mvllm.entrypoints.openai.server.settings import ServerSettings
from mvllm.entrypoints.openai.server.tracing_middleware import TracingMiddleware
from mvllm.entrypoints.openai.server.web_pages import docs_page, playground_page
from mvllm.entrypoints.root_plugins import api_formats, is_root_plugin, loaded_plugins, log_failures, root_plugins

_NO_QUALITY = {"q=0", "q=0.0", "q=0.00", "q=0.000"}
_RUNNING = "mvllm is running."
_WHERE_DOCS_ARE = "Its routes are described at /docs, and /openapi.json."


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
    body_routes = BodyRoutes(state, models, settings)
    starlette = build_starlette_app(state, models, metrics, settings, body_routes=body_routes)
    app: ASGIApp = DirectRoutes(starlette, body_routes.routes)
    if tracer is not None:
        plugins = loaded_plugins(settings.disabled_http_plugins)
        operations = {path: name for _, plugin in plugins for path, name in plugin.operations.items()}
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
        app,
        keys,
        metrics.observe,
        rate_limiter,
        browser_check,
        formats,
        has_page=settings.docs,
        access_log=settings.access_log,
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


def build_starlette_app(
    state: ServerState,
    models: OpenAIServingModels,
    metrics: HTTPMetrics,
    settings: ServerSettings,
    more_routers: Iterable[Router] = (),
    body_routes: BodyRoutes | None = None,
) -> Starlette:
    """The application without middleware.

    Args:
        more_routers: Routes beside those of the server.
        body_routes: Adds the routes with a JSON body.
    """
    body_routes = body_routes or BodyRoutes(state, models, settings)
    server = APIServerHandle("", state, models, settings, body_routes)
    log_failures(root_plugins(settings.disabled_http_plugins, settings.http_plugins))
    added = PluginRoutes(server)
    routes = Routes(server, metrics, added.store_completion)
    added.check_conflicts(routes.routers)
    plugins = load_http_plugins(
        [name for name in settings.http_plugins if not is_root_plugin(plugin_groups.require(plugin_groups.HTTP, name))],
        lambda name: HTTPServerHandle(name, state, models, settings),
    )
    routers = (*routes.routers, *added.routers, *more_routers)
    found: list[BaseRoute] = [each for router in routers for each in routes_of(router)]

    @cache
    def document() -> dict[str, Any]:
        parts = {plugin.prefix: plugin.app.routes for plugin in plugins if plugin.app is not None}
        formats = api_formats(settings.disabled_http_plugins)
        tags = {name: text for plugin in added.plugins for name, text in plugin.tags.items()}
        return openapi_document(found, parts, body_routes.body_types, formats, tags, UNAUTHENTICATED_PATHS)

    text = _root_text((plugin.root_text for plugin in added.plugins), has_docs=settings.docs)
    mounts = [Mount(plugin.prefix, plugin.asgi_app(body_routes.reader)) for plugin in plugins]
    pages = _pages(document, text, has_docs=settings.docs)
    return make_application([*found, *pages.routes, *mounts])


def build_app_without_engine(
    settings: ServerSettings, more_routers: Iterable[Router] = ()
) -> tuple[Starlette, Callable[[], Awaitable[None]]]:
    """An API server's application without an engine, and a function that ends what it uses.

    It has all routes, for the description of the API and to find out whether there is a route; those that need an
    engine answer 503. HTTP plugins and adapters of the settings are left out.

    Args:
        more_routers: Further routes.
    """
    state = ServerState(settings.heartbeat_timeout)
    plain = replace(settings, http_plugins=(), lora_modules=())
    models = OpenAIServingModels(("model",), "model")
    app = build_starlette_app(state, models, HTTPMetrics(CollectorRegistry()), plain, more_routers)
    return app, state.close


class DirectRoutes:
    """Answers requests to routes of POST without parameters in their paths, and passes others on to the application.

    These routes use nothing of the application's layers, each of which takes time for every request, and again whenever
    its task waits. Errors become the same responses.

    Args:
        app: The application.
        routes: Further routes of it, beside its APIRoutes.
    """

    def __init__(self, app: Starlette, routes: Iterable[Route]) -> None:
        self._app = app
        found = [*(each for each in app.routes if isinstance(each, APIRoute)), *routes]
        self._routes = {each.path: each for each in found if each.methods == {"POST"} and not each.param_convertors}

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
            response = await handle_client_disconnect(request, e)
        except Exception as e:  # noqa: BLE001  (to_api_error logs it)
            response = await handle_error(request, e)
        await response(scope, receive, send)


def _root_text(lines: Iterable[str | None], *, has_docs: bool) -> str:
    """What programs get at `/`: the first line of a plugin, for clients that look for it, and which program this is."""
    first = [line for line in lines if line is not None][:1]
    return "\n".join([*first, f"{_RUNNING} {_WHERE_DOCS_ARE}" if has_docs else _RUNNING, ""])


def _accepts_html(accept: str) -> bool:
    """Whether a header `Accept` names `text/html`, with a quality above 0."""
    kinds = [each.replace(" ", "").split(";") for each in accept.lower().split(",")]
    return any(kind == "text/html" and not _NO_QUALITY.intersection(more) for kind, *more in kinds)


def _pages(document: Callable[[], dict[str, Any]], text: str, *, has_docs: bool) -> APIRouter:
    """The routes for people: the page at `/`, and the description of the API.

    Args:
        document: The description.
        text: What programs get at `/`.
    """

    async def docs(request: Request) -> HTMLResponse:
        return docs_page(document())

    async def openapi(request: Request) -> dict[str, Any]:
        return document()

    async def root(request: Request) -> Response:
        is_page = has_docs and _accepts_html(",".join(request.headers.getlist("accept")))
        response = playground_page() if is_page else PlainTextResponse(text)
        response.headers["vary"] = "Accept"  # for caches
        return response

    pages = APIRouter()
    pages.add_api_route("/", root, include_in_schema=False)
    if has_docs:
        pages.add_api_route("/docs", docs, include_in_schema=False)
        pages.add_api_route("/openapi.json", openapi, include_in_schema=False)
    return pages

"""Applications of Starlette whose errors are responses in the format of the request's API."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from mvllm.entrypoints.openai.common.api_format import error_response
from mvllm.entrypoints.openai.common.errors import APIError, to_api_error
from mvllm.entrypoints.openai.common.streaming_response import CLIENT_CLOSED_REQUEST, ClientDisconnected
from mvllm.entrypoints.root_plugins import missing_part_of
from mvllm.errors import MvllmError

App = TypeVar("App", bound=Starlette)

_MAX_SHOWN = 200
"""Characters of a path in an error."""


def make_application(routes: Sequence[BaseRoute]) -> Starlette:
    """An application with these routes."""
    app = Starlette(routes=routes)
    app.router.redirect_slashes = False  # a redirect would contain the Host header that the client sent
    return add_error_handlers(app)


def add_error_handlers(app: App) -> App:
    """Adds handlers that turn exceptions into error responses; returns the application."""
    app.add_exception_handler(ClientDisconnected, handle_client_disconnect)
    for kind in (APIError, MvllmError, Exception):
        app.add_exception_handler(kind, handle_error)
    app.add_exception_handler(HTTPException, _handle_http_exception)
    return app


async def handle_client_disconnect(request: Request, error: Exception) -> Response:
    """The response that nobody reads, for the log."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def handle_error(request: Request, error: Exception) -> Response:
    """The response to a request that has raised any other error."""
    return error_response(to_api_error(error), request.scope)


async def _handle_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, APIError):  # it has more fields, such as `close`
        return error_response(error.__cause__, request.scope)
    if error.status_code == 404 and error.detail == "Not Found":  # a plugin's 404 has another text
        refused = APIError(404, _unknown_path(request), code="unknown_path")
        if (missing := missing_part_of(request.scope["path"])) is not None:
            refused = APIError(404, missing, code="not_installed")
        return error_response(refused, request.scope)
    refused = APIError(error.status_code, str(error.detail))
    if error.status_code == 405:
        refused = APIError(405, _wrong_method(request, error.headers or {}), code="method_not_allowed")
    response = error_response(refused, request.scope)
    response.headers.update(error.headers or {})
    return response


def _unknown_path(request: Request) -> str:
    """What was requested, and the path that was probably meant."""
    path = request.scope["path"]
    known = [found for route in request.app.routes if "{" not in (found := getattr(route, "path", "{"))]
    suffixes = [each for each in known if path != "/" and each.endswith(path)]
    near = suffixes or difflib.get_close_matches(path[:_MAX_SHOWN], known, n=1, cutoff=0.8)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"There is no route {request.method} {path[:_MAX_SHOWN]}.{hint}"


def _wrong_method(request: Request, headers: Mapping[str, str]) -> str:
    """What was requested, and what the path accepts."""
    allowed = headers.get("Allow", "")
    accepted = f", which accepts {allowed}" if allowed else ""
    return f"{request.method[:_MAX_SHOWN]} is no method of {request.scope['path'][:_MAX_SHOWN]}{accepted}."

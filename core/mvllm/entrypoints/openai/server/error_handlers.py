"""Applications of Starlette whose errors are responses in the format of the request's API."""

from __future__ import annotations

from collections.abc import Sequence
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
        refused = APIError(404, "There is no route at this path.", code="unknown_path")
        if (missing := missing_part_of(request.scope["path"])) is not None:
            refused = APIError(404, missing, code="not_installed")
        return error_response(refused, request.scope)
    refused = APIError(error.status_code, str(error.detail))
    if error.status_code == 405:
        refused = APIError(405, "This path does not accept this method.", code="method_not_allowed")
    response = error_response(refused, request.scope)
    response.headers.update(error.headers or {})
    return response

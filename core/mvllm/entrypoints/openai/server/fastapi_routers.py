"""Routers of FastAPI, which plugins may have: core does without FastAPI. Used only if a plugin has imported it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Router
from starlette.types import Receive, Scope, Send

from mvllm.entrypoints.openai.common.api_format import error_response
from mvllm.entrypoints.openai.common.errors import APIError
from mvllm.entrypoints.openai.server.error_handlers import add_error_handlers


def routes_of(router: Router) -> Sequence[BaseRoute]:
    """The routes of a plugin's router, for an application of Starlette."""
    fastapi = sys.modules.get("fastapi")
    is_fastapis = fastapi is not None and isinstance(router, fastapi.APIRouter)
    return [FastAPIRoutes(router)] if is_fastapis else router.routes


class FastAPIRoutes(BaseRoute):
    """The routes of a router of FastAPI, with those of the routers that it includes, as one route of Starlette.

    Args:
        router: The router.

    Attributes:
        app: The application that serves them.
    """

    def __init__(self, router: Router) -> None:
        from fastapi import APIRouter, FastAPI
        from fastapi.exceptions import RequestValidationError

        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
        self.app = add_error_handlers(app)
        self.app.add_exception_handler(RequestValidationError, _handle_validation_error)
        self.app.include_router(cast(APIRouter, router))

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """See Starlette's BaseRoute. The application notes its route in the scope."""
        found = (route.matches(scope)[0] for route in self.app.router.routes)
        return max(found, key=lambda match: match.value, default=Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        await self.app(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        """The description of the routes."""
        return self.app.openapi()


async def _handle_validation_error(request: Request, error: Exception) -> Response:
    name = str(cast(Any, error).errors()[0]["loc"][-1])
    refused = APIError(400, f"The value of the parameter {name[:40]!a} is not valid.", param=name[:40])
    return error_response(refused, request.scope)

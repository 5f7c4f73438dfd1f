"""Starlette's router and route, with what the description of the API says about a route."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route, Router
from starlette.types import Scope

from mvllm.entrypoints.openai.common.json_response import json_response

Endpoint = Callable[[Request], Awaitable[Any]]
"""Called with the request. The parameters of its path are `request.path_params`, those of its query are read by
`read_query`. Returns a Response, or a value that is sent as JSON."""


class APIRoute(Route):
    """A route with its description.

    Attributes:
        tags: Groups of the description that it belongs to.
        summary: What it does, in a few words.
        description: The docstring of its endpoint.
        query: The type of its query parameters; None for none.
        response: The type of its response, or types by media type, as for `response_schema`; None if it is not known.
        openapi_extra: More fields of its operation in OpenAPI, such as `requestBody`.
    """

    methods: set[str]
    tags: Sequence[str] = ()
    summary = ""
    description: str | None = None
    query: type[msgspec.Struct] | None = None
    response: Any = None
    openapi_extra: Mapping[str, Any] = MappingProxyType({})

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """See Starlette's Route. The scope of a request has its route, for the log and the metrics."""
        match, child_scope = super().matches(scope)
        return match, {**child_scope, "route": self} if child_scope else child_scope


class APIRouter(Router):
    """A group of routes. `add_api_route` has the arguments of FastAPI's that apply.

    Args:
        tags: Groups of the description that its routes belong to.
    """

    def __init__(self, tags: Sequence[str] = ()) -> None:
        super().__init__(redirect_slashes=False)
        self.tags = list(tags)

    def add_api_route(
        self,
        path: str,
        endpoint: Endpoint,
        *,
        methods: Collection[str] = ("GET",),
        summary: str = "",
        query: type[msgspec.Struct] | None = None,
        response: Any = None,
        openapi_extra: Mapping[str, Any] = MappingProxyType({}),
        include_in_schema: bool = True,
    ) -> None:
        """Adds a route. See APIRoute. HEAD is not among its methods: RequestMiddleware makes it GET."""
        route = APIRoute(path, _respond_with(endpoint), include_in_schema=include_in_schema)
        route.methods = {method.upper() for method in methods}
        route.tags, route.summary, route.description = self.tags, summary, endpoint.__doc__
        route.query, route.response, route.openapi_extra = query, response, openapi_extra
        self.routes.append(route)


def _respond_with(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint of Starlette, which returns a Response."""

    async def respond(request: Request) -> Response:
        found = await endpoint(request)
        return found if isinstance(found, Response) else json_response(found)

    return respond

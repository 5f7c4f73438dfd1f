"""Routes of `/v1/responses`: create, read, delete and cancel responses."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mvllm.entrypoints.openai.common.json_response import json_response
from mvllm.entrypoints.openai.common.serving_context import ServingContext
from mvllm.entrypoints.openai.protocol import ResponsesRequest
from mvllm.entrypoints.openai.responses.serving import ResponsesHandler
from mvllm.entrypoints.openai.responses.store import ResponseStore
from mvllm.entrypoints.openai.server.body_routes import BodyRoutes
from mvllm.entrypoints.openai.server.middleware import request_caller
from mvllm.entrypoints.openai.server.settings import ServerSettings
from mvllm.errors import RequestError


class ResponsesRoutes:
    """The routes, and the responses that the server stores.

    Args:
        settings: The server's.
        body_routes: Reads bodies and runs handlers.
    """

    def __init__(self, settings: ServerSettings, body_routes: BodyRoutes) -> None:
        self._body_routes = body_routes
        self._store = ResponseStore(settings.max_stored_responses, settings.max_stored_bytes)

    def add_to(self, router: APIRouter) -> None:
        """Adds the routes to a router."""
        summary = "Generate the next response of a conversation."
        self._body_routes.add(router, "/v1/responses", ResponsesRequest, self.create, summary)
        path = "/v1/responses/{response_id}"
        router.add_api_route(path, self.get_response, methods=["GET"], summary="A stored or running response.")
        router.add_api_route(path, self.delete_response, methods=["DELETE"], summary="Delete a stored response.")
        router.add_api_route(f"{path}/cancel", self.cancel_response, methods=["POST"], summary="Cancel a response.")

    async def create(self, request: Request) -> Response:
        """Generates the next response of a conversation."""
        caller = request_caller(request.scope)

        def make_handler(context: ServingContext, model: str, body: ResponsesRequest) -> ResponsesHandler:
            return ResponsesHandler(context, model, body, self._store, caller)

        return await self._body_routes.run_handler(request, ResponsesRequest, make_handler)

    async def get_response(self, request: Request, response_id: str, stream: bool = False) -> Response:
        """A response that has ended or is being generated."""
        if stream:
            raise RequestError("stream is not possible here: ask for the response again later.", parameter="stream")
        return json_response(self._store.body(response_id, request_caller(request.scope)))

    async def delete_response(self, request: Request, response_id: str) -> Response:
        """Deletes a stored response."""
        self._store.delete(response_id, request_caller(request.scope))
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel_response(self, request: Request, response_id: str) -> Response:
        """Cancels a response that is being generated."""
        return json_response(self._store.cancel(response_id, request_caller(request.scope)))

"""The route `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mvllm.entrypoints.openai.chat.serving import ChatCompletionHandler
from mvllm.entrypoints.openai.common.serving_base import StreamingHandler
from mvllm.entrypoints.openai.protocol import ChatCompletionRequest
from mvllm.entrypoints.openai.server.body_routes import BodyRoutes

StoreCompletion = Callable[[ChatCompletionHandler, ChatCompletionRequest, Request], StreamingHandler]
"""Makes a handler that stores the completion of another, of a request with `store: true`. It may return the handler
that it gets."""


class ChatCompletionRoutes:
    """The route.

    Args:
        body_routes: Reads bodies and runs handlers.
        store: Stores completions; None if the server stores none.
    """

    def __init__(self, body_routes: BodyRoutes, store: StoreCompletion | None) -> None:
        self._body_routes = body_routes
        self._store = store

    def add_to(self, router: APIRouter) -> None:
        """Adds the route to a router."""
        summary = "Generate the next message of a conversation."
        self._body_routes.add(router, "/v1/chat/completions", ChatCompletionRequest, self.create, summary)

    async def create(self, request: Request) -> Response:
        """Generates the next message of a conversation."""
        context, model, body = await self._body_routes.decode_for_model(request, ChatCompletionRequest)
        handler = ChatCompletionHandler(context, model, body)
        if body.store is True and self._store is not None:
            return await self._body_routes.run(request, self._store(handler, body, request), model)
        return await self._body_routes.run(request, handler, model)

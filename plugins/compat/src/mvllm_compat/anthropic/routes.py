"""Routes of the Anthropic Messages API."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from mvllm.extension_api.http import APIRouter, BodyRoutes, cancel_on_disconnect, json_response, renamed_fields
from mvllm_compat.anthropic.input_messages import CHAT_TO_MESSAGES_FIELDS, to_chat_request
from mvllm_compat.anthropic.messages import MessagesHandler
from mvllm_compat.anthropic.protocol import CountTokensRequest, MessagesRequest
from mvllm_compat.anthropic.response_types import Message, MessageStreamEvent, MessageTokensCount

_CONVERSATION = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}


class AnthropicRoutes:
    """The routes.

    Args:
        body_routes: Reads bodies and runs handlers.
    """

    def __init__(self, body_routes: BodyRoutes) -> None:
        self._body_routes = body_routes

    def add_to(self, router: APIRouter) -> None:
        """Adds the routes to a router."""
        add, path = self._body_routes.add, "/v1/messages"
        summary = "Generate the next message of a conversation (Anthropic's API)."
        example = {**_CONVERSATION, "max_tokens": 32, "temperature": 0}
        response = {"application/json": Message, "text/event-stream": MessageStreamEvent}
        route = (path, MessagesRequest, MessagesHandler, summary, example)
        self._body_routes.add_handler(router, *route, response=response)
        summary = "Count the tokens of a conversation (Anthropic's API)."
        counted = (f"{path}/count_tokens", CountTokensRequest, self.count_tokens, summary, _CONVERSATION)
        add(router, *counted, response=MessageTokensCount)

    async def count_tokens(self, request: Request) -> Response:
        """The number of tokens of a conversation's prompt."""
        context, _, body = await self._body_routes.decode_for_model(request, CountTokensRequest)
        with renamed_fields(CHAT_TO_MESSAGES_FIELDS):
            chat = to_chat_request(body)
            async with cancel_on_disconnect(request.receive):
                prompt = await context.prompt_renderer.render(chat)
        return json_response({"input_tokens": len(prompt["prompt_token_ids"])})

"""Routes of the Anthropic Messages API, and the models in its format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mvllm.entrypoints.anthropic.input_messages import CHAT_TO_MESSAGES_FIELDS, to_chat_request
from mvllm.entrypoints.anthropic.protocol import CountTokensRequest, MessagesRequest
from mvllm.entrypoints.anthropic.serving import MessagesHandler
from mvllm.entrypoints.openai.chat.serving_base import renamed_fields
from mvllm.entrypoints.openai.common.json_response import json_response
from mvllm.entrypoints.openai.common.streaming_response import cancel_on_disconnect
from mvllm.entrypoints.openai.server.body_routes import BodyRoutes


class AnthropicRoutes:
    """The routes.

    Args:
        body_routes: Reads bodies and runs handlers.
    """

    def __init__(self, body_routes: BodyRoutes) -> None:
        self._body_routes = body_routes

    def add_to(self, router: APIRouter) -> None:
        """Adds the routes to a router."""
        summary = "Generate the next message of a conversation (Anthropic's API)."
        self._body_routes.add_handler(router, "/v1/messages", MessagesRequest, MessagesHandler, summary)
        summary = "Count the tokens of a conversation (Anthropic's API)."
        self._body_routes.add(router, "/v1/messages/count_tokens", CountTokensRequest, self.count_tokens, summary)

    async def count_tokens(self, request: Request) -> Response:
        """The number of tokens of a conversation's prompt."""
        context, _, body = await self._body_routes.decode_for_model(request, CountTokensRequest)
        with renamed_fields(CHAT_TO_MESSAGES_FIELDS):
            chat = to_chat_request(body)
            async with cancel_on_disconnect(request.receive):
                prompt = await context.prompt_renderer.render(chat)
        return json_response({"input_tokens": len(prompt["prompt_token_ids"])})


def model_info(card: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of `/v1/models` in Anthropic's format.

    Args:
        card: The entry in OpenAI's format.
    """
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": datetime.fromtimestamp(card["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": card["max_model_len"],
        "max_tokens": card["max_model_len"],
    }


def model_list(cards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The response of `/v1/models` in Anthropic's format. It is one page."""
    data = [model_info(card) for card in cards]
    return {"data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}

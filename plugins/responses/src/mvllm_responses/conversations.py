"""Routes of `/v1/conversations`: conversations to which responses add their items."""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mvllm.extension_api import APIError, RequestError
from mvllm.extension_api.http import BodyRoutes, encode_json, json_response, request_caller
from mvllm_responses.input_items import MessageBuilder
from mvllm_responses.items import Item, check_metadata, input_items, page_of
from mvllm_responses.protocol import ConversationItemsRequest, ConversationRequest, ConversationUpdateRequest
from mvllm_responses.store import ResponseStore

_MAX_ITEMS_PER_REQUEST = 20
_ITEMS = {"items": [{"role": "user", "content": "What is the capital of France?"}]}
"""An example of a body."""


class ConversationsRoutes:
    """The routes.

    Args:
        store: Has the conversations.
        body_routes: Reads bodies.
    """

    def __init__(self, store: ResponseStore, body_routes: BodyRoutes) -> None:
        self._store = store
        self._body_routes = body_routes

    def add_to(self, router: APIRouter) -> None:
        """Adds the routes to a router."""
        add, get = self._body_routes.add, router.add_api_route
        path = "/v1/conversations"
        of_cities, of_rivers = ({"metadata": {"topic": topic}} for topic in ("cities", "rivers"))  # examples
        one, items = f"{path}/{{conversation_id}}", f"{path}/{{conversation_id}}/items"
        add(router, path, ConversationRequest, self.create, "Start a conversation that the server stores.", of_cities)
        get(one, self.get_conversation, methods=["GET"], summary="A conversation, without its items.")
        add(router, one, ConversationUpdateRequest, self.update, "Change the metadata of a conversation.", of_rivers)
        get(one, self.delete, methods=["DELETE"], summary="Delete a conversation and its items.")
        get(items, self.list_items, methods=["GET"], summary="The items of a conversation.")
        add(router, items, ConversationItemsRequest, self.create_items, "Add items to a conversation.", _ITEMS)
        get(f"{items}/{{item_id}}", self.get_item, methods=["GET"], summary="One item of a conversation.")
        get(f"{items}/{{item_id}}", self.delete_item, methods=["DELETE"], summary="Delete an item of a conversation.")

    async def create(self, request: Request) -> Response:
        """Starts a conversation."""
        body = await self._body_routes.decode(request, ConversationRequest)
        check_metadata(body.metadata)
        items = _checked_items(body.items) if body.items else []
        conversation: dict[str, Any] = {
            "id": f"conv_{uuid.uuid4().hex}",
            "object": "conversation",
            "created_at": int(time.time()),
            "metadata": body.metadata or {},
        }
        encoded = encode_json(conversation)
        await self._store.add_conversation(conversation["id"], encoded, request_caller(request.scope), items)
        return json_response(encoded)

    async def get_conversation(self, request: Request, conversation_id: str) -> Response:
        """A conversation without its items."""
        found = await self._store.conversation(conversation_id, request_caller(request.scope))
        return json_response(found.body)

    async def update(self, request: Request, conversation_id: str) -> Response:
        """Replaces the metadata of a conversation."""
        body = await self._body_routes.decode(request, ConversationUpdateRequest)
        check_metadata(body.metadata)
        found = await self._store.conversation(conversation_id, request_caller(request.scope))
        conversation = {**msgspec.json.decode(found.body), "metadata": body.metadata or {}}
        encoded = encode_json(conversation)
        await self._store.update_conversation(conversation_id, encoded)
        return json_response(encoded)

    async def delete(self, request: Request, conversation_id: str) -> Response:
        """Deletes a conversation and its items."""
        await self._store.conversation(conversation_id, request_caller(request.scope))
        await self._store.delete_conversation(conversation_id)
        return json_response({"id": conversation_id, "object": "conversation.deleted", "deleted": True})

    async def list_items(
        self,
        request: Request,
        conversation_id: str,
        after: str | None = None,
        limit: int = 20,
        order: str = "desc",
    ) -> Response:
        """A page of the items, the newest first by default."""
        await self._store.conversation(conversation_id, request_caller(request.scope))
        is_descending = check_page(limit, order)
        items = await self._store.items(conversation_id, after, limit + 1, descending=is_descending)
        return json_response(page_of(items[:limit], has_more=len(items) > limit))

    async def create_items(self, request: Request, conversation_id: str) -> Response:
        """Adds items to the end of a conversation."""
        body = await self._body_routes.decode(request, ConversationItemsRequest)
        await self._store.conversation(conversation_id, request_caller(request.scope))
        items = _checked_items(body.items)
        await self._store.add_items(conversation_id, items)
        return json_response(page_of(items, has_more=False))

    async def get_item(self, request: Request, conversation_id: str, item_id: str) -> Response:
        """One item."""
        await self._store.conversation(conversation_id, request_caller(request.scope))
        return json_response(await self._store.item(conversation_id, item_id))

    async def delete_item(self, request: Request, conversation_id: str, item_id: str) -> Response:
        """Deletes an item; returns the conversation."""
        found = await self._store.conversation(conversation_id, request_caller(request.scope))
        await self._store.delete_item(conversation_id, item_id)
        return json_response(found.body)


def check_page(limit: int, order: str) -> bool:
    """Checks the parameters of a page; returns whether the newest items come first.

    Raises:
        APIError: One is not valid (400).
    """
    if not 1 <= limit <= 100:
        raise APIError(400, f"limit must be from 1 to 100; found {limit}.", param="limit")
    if order not in ("asc", "desc"):
        raise APIError(400, "order must be asc or desc.", param="order")
    return order == "desc"


def _checked_items(given: list[dict[str, Any]] | None) -> list[Item]:
    """Items as they are stored.

    Raises:
        RequestError: One is not valid, or there are too many.
    """
    if len(given or ()) > _MAX_ITEMS_PER_REQUEST:
        raise RequestError(
            f"items may have {_MAX_ITEMS_PER_REQUEST} entries; found {len(given or ())}. Send several requests.",
            parameter="items",
        )
    items = input_items(given, "items")
    try:
        MessageBuilder(checks_approvals=False).add(items, "items")
    except RequestError as e:
        raise RequestError(str(e), parameter="items") from e
    return items

"""Routes of `/v1/conversations`: conversations to which responses add their items."""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mvllm.extension_api import APIError, RequestError
from mvllm.extension_api.http import APIRouter, BodyRoutes, encode_json, json_response, read_query, request_caller
from mvllm_responses.input_items import MessageBuilder
from mvllm_responses.items import Item, check_metadata, input_items, page_of
from mvllm_responses.protocol import ConversationItemsRequest, ConversationRequest, ConversationUpdateRequest
from mvllm_responses.response_types import Conversation, DeletedObject, ItemPage, ResponseItem
from mvllm_responses.store import ResponseStore

_MAX_ITEMS_PER_REQUEST = 20
_ITEMS = {"items": [{"role": "user", "content": "What is the capital of France?"}]}
"""An example of a body."""


class PageQuery(msgspec.Struct):
    """Query of a page of objects: at most `limit`, of those after the one with the id `after`."""

    after: str | None = None
    limit: int = 20
    order: str = "desc"


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
        summary = "Start a conversation that the server stores."
        add(router, path, ConversationRequest, self.create, summary, of_cities, response=Conversation)
        get(one, self.get_conversation, summary="A conversation, without its items.", response=Conversation)
        summary = "Change the metadata of a conversation."
        add(router, one, ConversationUpdateRequest, self.update, summary, of_rivers, response=Conversation)
        summary = "Delete a conversation and its items."
        get(one, self.delete, methods=["DELETE"], summary=summary, response=DeletedObject)
        get(items, self.list_items, summary="The items of a conversation.", query=PageQuery, response=ItemPage)
        summary = "Add items to a conversation."
        add(router, items, ConversationItemsRequest, self.create_items, summary, _ITEMS, response=ItemPage)
        item, summary = f"{items}/{{item_id}}", "Delete an item of a conversation."
        get(item, self.get_item, summary="One item of a conversation.", response=ResponseItem)
        get(item, self.delete_item, methods=["DELETE"], summary=summary, response=Conversation)

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

    async def get_conversation(self, request: Request) -> Response:
        """A conversation without its items."""
        conversation_id = request.path_params["conversation_id"]
        found = await self._store.conversation(conversation_id, request_caller(request.scope))
        return json_response(found.body)

    async def update(self, request: Request) -> Response:
        """Replaces the metadata of a conversation."""
        conversation_id = request.path_params["conversation_id"]
        body = await self._body_routes.decode(request, ConversationUpdateRequest)
        check_metadata(body.metadata)
        found = await self._store.conversation(conversation_id, request_caller(request.scope))
        conversation = {**msgspec.json.decode(found.body), "metadata": body.metadata or {}}
        encoded = encode_json(conversation)
        await self._store.update_conversation(conversation_id, encoded)
        return json_response(encoded)

    async def delete(self, request: Request) -> Response:
        """Deletes a conversation and its items."""
        conversation_id = request.path_params["conversation_id"]
        await self._store.conversation(conversation_id, request_caller(request.scope))
        await self._store.delete_conversation(conversation_id)
        return json_response({"id": conversation_id, "object": "conversation.deleted", "deleted": True})

    async def list_items(self, request: Request) -> Response:
        """A page of the items, the newest first by default."""
        conversation_id, page = request.path_params["conversation_id"], read_query(request, PageQuery)
        await self._store.conversation(conversation_id, request_caller(request.scope))
        is_descending = check_page(page)
        items = await self._store.items(conversation_id, page.after, page.limit + 1, descending=is_descending)
        return json_response(page_of(items[: page.limit], has_more=len(items) > page.limit))

    async def create_items(self, request: Request) -> Response:
        """Adds items to the end of a conversation."""
        conversation_id = request.path_params["conversation_id"]
        body = await self._body_routes.decode(request, ConversationItemsRequest)
        await self._store.conversation(conversation_id, request_caller(request.scope))
        items = _checked_items(body.items)
        await self._store.add_items(conversation_id, items)
        return json_response(page_of(items, has_more=False))

    async def get_item(self, request: Request) -> Response:
        """One item."""
        conversation_id, item_id = request.path_params["conversation_id"], request.path_params["item_id"]
        await self._store.conversation(conversation_id, request_caller(request.scope))
        return json_response(await self._store.item(conversation_id, item_id))

    async def delete_item(self, request: Request) -> Response:
        """Deletes an item; returns the conversation."""
        conversation_id, item_id = request.path_params["conversation_id"], request.path_params["item_id"]
        found = await self._store.conversation(conversation_id, request_caller(request.scope))
        await self._store.delete_item(conversation_id, item_id)
        return json_response(found.body)


def check_page(page: PageQuery) -> bool:
    """Checks the parameters of a page; returns whether the newest items come first.

    Raises:
        APIError: One is not valid (400).
    """
    if not 1 <= page.limit <= 100:
        raise APIError(400, f"limit must be from 1 to 100; found {page.limit}.", param="limit")
    if page.order not in ("asc", "desc"):
        raise APIError(400, "order must be asc or desc.", param="order")
    return page.order == "desc"


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

"""Routes of stored chat completions: read, change, list and delete them."""

from __future__ import annotations

import re

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mvllm.extension_api.http import APIRouter, BodyRoutes, encode_json, json_response, read_query, request_caller
from mvllm_responses.conversations import PageQuery, check_page
from mvllm_responses.items import page_of
from mvllm_responses.protocol import CompletionUpdateRequest
from mvllm_responses.response_types import (
    DeletedObject,
    MessagePage,
    StoredChatCompletion,
    StoredChatCompletionPage,
)
from mvllm_responses.store import ResponseStore
from mvllm_responses.stored_completions import checked_metadata

PATH = "/v1/chat/completions"
_METADATA = re.compile(r"metadata\[(.*)\]", re.DOTALL)


class MessagesQuery(PageQuery):
    """Query of the messages of a completion: the oldest first by default."""

    order: str = "asc"


class CompletionsQuery(MessagesQuery):
    """Query of stored completions. `metadata[name]=value` selects some, too."""

    model: str | None = None


class StoredCompletionRoutes:
    """The routes.

    Args:
        store: Has the stored completions.
        body_routes: Reads bodies.
    """

    def __init__(self, store: ResponseStore, body_routes: BodyRoutes) -> None:
        self._store = store
        self._body_routes = body_routes

    def add_to(self, router: APIRouter) -> None:
        """Adds the routes to a router."""
        add, one = router.add_api_route, f"{PATH}/{{completion_id}}"
        page, summary = StoredChatCompletionPage, "The stored completions."
        add(PATH, self.list_completions, summary=summary, query=CompletionsQuery, response=page)
        add(one, self.get_completion, summary="A stored completion.", response=StoredChatCompletion)
        summary, example = "Change the metadata of a stored completion.", {"metadata": {"topic": "rivers"}}
        body, response = CompletionUpdateRequest, StoredChatCompletion
        self._body_routes.add(router, one, body, self.update, summary, example, response=response)
        add(one, self.delete, methods=["DELETE"], summary="Delete a stored completion.", response=DeletedObject)
        summary = "The messages of its request."
        add(f"{one}/messages", self.list_messages, summary=summary, query=MessagesQuery, response=MessagePage)

    async def list_completions(self, request: Request) -> Response:
        """A page of the stored completions, the oldest first by default. `metadata[name]=value` selects some."""
        page = read_query(request, CompletionsQuery)
        is_descending = check_page(page)
        wanted = {
            match[1]: value for name, value in request.query_params.items() if (match := _METADATA.fullmatch(name))
        }
        found = await self._store.completions(
            request_caller(request.scope),
            page.after,
            page.limit + 1,
            descending=is_descending,
            model=page.model,
            metadata=wanted,
        )
        return json_response(page_of(found[: page.limit], has_more=len(found) > page.limit))

    async def get_completion(self, request: Request) -> Response:
        """A stored completion."""
        completion_id = request.path_params["completion_id"]
        return json_response((await self._store.completion(completion_id, request_caller(request.scope))).body)

    async def update(self, request: Request) -> Response:
        """Replaces the metadata of a stored completion."""
        completion_id = request.path_params["completion_id"]
        body = await self._body_routes.decode(request, CompletionUpdateRequest)
        metadata = checked_metadata(body.metadata)
        found = await self._store.completion(completion_id, request_caller(request.scope))
        encoded = encode_json({**msgspec.json.decode(found.body), "metadata": metadata})
        await self._store.update_conversation(completion_id, encoded)
        return json_response(encoded)

    async def delete(self, request: Request) -> Response:
        """Deletes a stored completion."""
        completion_id = request.path_params["completion_id"]
        await self._store.completion(completion_id, request_caller(request.scope))
        await self._store.delete_conversation(completion_id)
        return json_response({"id": completion_id, "object": "chat.completion.deleted", "deleted": True})

    async def list_messages(self, request: Request) -> Response:
        """A page of the messages of the completion's request."""
        completion_id, page = request.path_params["completion_id"], read_query(request, MessagesQuery)
        await self._store.completion(completion_id, request_caller(request.scope))
        is_descending = check_page(page)
        items = await self._store.items(completion_id, page.after, page.limit + 1, descending=is_descending)
        return json_response(page_of(items[: page.limit], has_more=len(items) > page.limit))

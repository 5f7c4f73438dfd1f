"""Routes of stored chat completions: read, change, list and delete them."""

from __future__ import annotations

import re

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mvllm.extension_api.http import BodyRoutes, encode_json, json_response, request_caller
from mvllm_responses.conversations import check_page
from mvllm_responses.items import page_of
from mvllm_responses.protocol import CompletionUpdateRequest
from mvllm_responses.store import ResponseStore
from mvllm_responses.stored_completions import checked_metadata

PATH = "/v1/chat/completions"
_METADATA = re.compile(r"metadata\[(.*)\]", re.DOTALL)


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
        add(PATH, self.list_completions, methods=["GET"], summary="The stored completions.")
        add(one, self.get_completion, methods=["GET"], summary="A stored completion.")
        summary, example = "Change the metadata of a stored completion.", {"metadata": {"topic": "rivers"}}
        self._body_routes.add(router, one, CompletionUpdateRequest, self.update, summary, example)
        add(one, self.delete, methods=["DELETE"], summary="Delete a stored completion.")
        add(f"{one}/messages", self.list_messages, methods=["GET"], summary="The messages of its request.")

    async def list_completions(
        self, request: Request, after: str | None = None, limit: int = 20, order: str = "asc", model: str | None = None
    ) -> Response:
        """A page of the stored completions, the oldest first by default. `metadata[name]=value` selects some."""
        is_descending = check_page(limit, order)
        wanted = {
            match[1]: value for name, value in request.query_params.items() if (match := _METADATA.fullmatch(name))
        }
        found = await self._store.completions(
            request_caller(request.scope), after, limit + 1, descending=is_descending, model=model, metadata=wanted
        )
        return json_response(page_of(found[:limit], has_more=len(found) > limit))

    async def get_completion(self, request: Request, completion_id: str) -> Response:
        """A stored completion."""
        return json_response((await self._store.completion(completion_id, request_caller(request.scope))).body)

    async def update(self, request: Request, completion_id: str) -> Response:
        """Replaces the metadata of a stored completion."""
        body = await self._body_routes.decode(request, CompletionUpdateRequest)
        metadata = checked_metadata(body.metadata)
        found = await self._store.completion(completion_id, request_caller(request.scope))
        encoded = encode_json({**msgspec.json.decode(found.body), "metadata": metadata})
        await self._store.update_conversation(completion_id, encoded)
        return json_response(encoded)

    async def delete(self, request: Request, completion_id: str) -> Response:
        """Deletes a stored completion."""
        await self._store.completion(completion_id, request_caller(request.scope))
        await self._store.delete_conversation(completion_id)
        return json_response({"id": completion_id, "object": "chat.completion.deleted", "deleted": True})

    async def list_messages(
        self, request: Request, completion_id: str, after: str | None = None, limit: int = 20, order: str = "asc"
    ) -> Response:
        """A page of the messages of the completion's request."""
        await self._store.completion(completion_id, request_caller(request.scope))
        is_descending = check_page(limit, order)
        items = await self._store.items(completion_id, after, limit + 1, descending=is_descending)
        return json_response(page_of(items[:limit], has_more=len(items) > limit))

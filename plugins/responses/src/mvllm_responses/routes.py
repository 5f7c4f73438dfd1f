"""Routes of `/v1/responses`: create, read, delete and cancel responses. With those of all other stored objects."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mvllm.extension_api import APIError, RequestError
from mvllm.extension_api.http import (
    APIRouter,
    APIServerHandle,
    Caller,
    ChatCompletionHandler,
    ChatCompletionRequest,
    Handler,
    ServingContext,
    json_response,
    read_query,
    request_caller,
)
from mvllm_responses.background import BackgroundResponses
from mvllm_responses.client_functions import unknown_tools
from mvllm_responses.conversations import ConversationsRoutes, PageQuery, check_page
from mvllm_responses.items import Item, page_of
from mvllm_responses.mcp.toolbox import MCPServers
from mvllm_responses.protocol import ResponsesRequest
from mvllm_responses.response_types import DeletedObject, InputTokens, ItemPage, ResponsesResponse, ResponseStreamEvent
from mvllm_responses.responses import (
    History,
    InputTokensHandler,
    ResponsesHandler,
    check_combinations,
)
from mvllm_responses.settings import ResponsesSettings
from mvllm_responses.store import ResponseStore
from mvllm_responses.store_file import store_limits
from mvllm_responses.stored_completion_routes import StoredCompletionRoutes
from mvllm_responses.stored_completions import StoredCompletionHandler
from mvllm_responses.unsupported_fields import reject_unsupported_fields

_MAX_EVENT = 1 << 62
_EXAMPLE = {"input": "What is the capital of France?", "max_output_tokens": 32, "temperature": 0}


class ResponseQuery(msgspec.Struct):
    """Query of a stored response."""

    stream: bool = False
    starting_after: int = -1


class ResponsesRoutes:
    """The routes, the responses and conversations that the server stores, and its tool servers.

    Args:
        server: The API server.
    """

    def __init__(self, server: APIServerHandle) -> None:
        settings = server.settings(ResponsesSettings)
        self._body_routes = body_routes = server.body_routes
        limits = store_limits(server.server_settings, settings)
        self._store = ResponseStore(settings.responses_store, limits)
        self._conversations = ConversationsRoutes(self._store, body_routes)
        self._completions = StoredCompletionRoutes(self._store, body_routes)
        self._background = BackgroundResponses(self._store, body_routes.send_timeout)
        self._mcp_servers = MCPServers(settings.mcp)

    def add_to(self, router: APIRouter) -> None:
        """Adds the routes to a router."""
        summary = "Generate the next response of a conversation."
        streamed = {"application/json": ResponsesResponse, "text/event-stream": ResponseStreamEvent}
        add_body = self._body_routes.add
        add_body(router, "/v1/responses", ResponsesRequest, self.create, summary, _EXAMPLE, response=streamed)
        summary = "Count the tokens of what a response would be generated from."
        path = "/v1/responses/input_tokens"
        add_body(router, path, ResponsesRequest, self.input_tokens, summary, _EXAMPLE, response=InputTokens)
        router.add_api_route("/v1/responses/compact", self.compact, methods=["POST"], include_in_schema=False)
        add, path = router.add_api_route, "/v1/responses/{response_id}"
        summary = "A stored or running response."
        add(path, self.get_response, summary=summary, query=ResponseQuery, response=streamed)
        summary = "Delete a stored response."
        add(path, self.delete_response, methods=["DELETE"], summary=summary, response=DeletedObject)
        summary = "Cancel a response."
        add(f"{path}/cancel", self.cancel_response, methods=["POST"], summary=summary, response=ResponsesResponse)
        summary = "The items before its output."
        add(f"{path}/input_items", self.list_input_items, summary=summary, query=PageQuery, response=ItemPage)
        self._conversations.add_to(router)
        self._completions.add_to(router)

    def store_completion(
        self, handler: ChatCompletionHandler, body: ChatCompletionRequest, request: Request
    ) -> Handler:
        """A handler that stores a chat completion, or `handler` if nothing is stored."""
        if not self._store.is_enabled:
            return handler
        return StoredCompletionHandler(handler, body, self._store, request_caller(request.scope))

    async def close(self) -> None:
        """Ends the tool servers and the store, when no response runs any more."""
        await self._mcp_servers.close()
        await self._store.close()

    async def create(self, request: Request) -> Response:
        """Generates the next response of a conversation."""
        context, model, body = await self._body_routes.decode_for_model(request, ResponsesRequest)
        reject_unsupported_fields(body)
        handler = await self._handler(request, context, model, body)
        if not body.background:
            return await self._body_routes.run(request, handler, model)
        if not self._store.is_enabled:
            raise RequestError(
                "background needs the response to be stored, but this server stores none (--max-stored-responses 0).",
                parameter="background",
            )
        admitted = self._body_routes.admit(request, handler, model, in_background=True)
        return await self._background.start(request, handler, admitted)

    async def input_tokens(self, request: Request) -> Response:
        """The number of tokens of the prompt that `create` would run."""
        context, model, body = await self._body_routes.decode_for_model(request, ResponsesRequest)
        reject_unsupported_fields(body)
        handler = await self._handler(request, context, model, body)
        return await self._body_routes.run(request, InputTokensHandler(handler), model)

    async def compact(self, request: Request) -> Response:
        """Not offered: what it returns is encrypted, and only the service can read it."""
        raise APIError(
            404,
            "This server does not offer /v1/responses/compact. Send truncation='auto' to leave out the oldest messages "
            "of a conversation that is too long, or shorten the input.",
            code="not_offered",
        )

    async def get_response(self, request: Request) -> Response:
        """A response that has ended or is being generated, or its events after number `starting_after`."""
        response_id, query = request.path_params["response_id"], read_query(request, ResponseQuery)
        caller = request_caller(request.scope)
        if not query.stream:
            return json_response(await self._store.body(response_id, caller))
        if not (await self._store.response(response_id, caller)).is_streamed:
            raise RequestError(
                "stream is not possible here: only responses that were started with background and stream can be "
                "streamed again. Ask for the response without stream.",
                parameter="stream",
            )
        return self._background.stream(response_id, max(-1, min(query.starting_after, _MAX_EVENT)))

    async def delete_response(self, request: Request) -> Response:
        """Deletes a stored response."""
        response_id = request.path_params["response_id"]
        await self._store.delete(response_id, request_caller(request.scope))
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel_response(self, request: Request) -> Response:
        """Cancels a response that is being generated."""
        response_id = request.path_params["response_id"]
        return json_response(await self._store.cancel(response_id, request_caller(request.scope)))

    async def list_input_items(self, request: Request) -> Response:
        """A page of the items before the output of a response: of earlier turns and of its input."""
        response_id, page = request.path_params["response_id"], read_query(request, PageQuery)
        stored = await self._store.response(response_id, request_caller(request.scope))
        is_descending = check_page(page)
        items = msgspec.json.decode(stored.context, type=list[Item])
        if is_descending:
            items.reverse()
        first = 0
        if page.after is not None:
            first = 1 + next((i for i, item in enumerate(items) if item["id"] == page.after), len(items))
            if first > len(items):
                raise APIError(400, "after is not the id of an item.", param="after")
        end = first + page.limit
        return json_response(page_of(items[first:end], has_more=len(items) > end))

    async def _handler(
        self, request: Request, context: ServingContext, model: str, body: ResponsesRequest
    ) -> ResponsesHandler:
        """The handler of a request. Kinds of tools that are not known are reported.

        Raises:
            As `_history` and ResponsesHandler.
        """
        check_combinations(body)
        self._body_routes.reader.report_unknown(unknown_tools(body.tools), request.scope)
        caller = request_caller(request.scope)
        history = await self._history(body, caller)
        toolbox = self._mcp_servers.toolbox(body.tools)
        return ResponsesHandler(context, model, body, self._store, caller, history, toolbox)

    async def _history(self, body: ResponsesRequest, caller: Caller) -> History:
        """What a response continues.

        Raises:
            RequestError: `conversation` is not valid.
            APIError: The previous response or the conversation is not known.
        """
        if body.previous_response_id is not None:
            return History(*await self._store.previous(body.previous_response_id, caller))
        if body.conversation is None:
            return History()
        given = body.conversation
        conversation_id = given if isinstance(given, str) else given.get("id")
        if not isinstance(conversation_id, str):
            raise RequestError("conversation must be an id, or an object with one.", parameter="conversation")
        await self._store.conversation(conversation_id, caller)
        return History(await self._store.items(conversation_id), conversation_id=conversation_id)

"""Routes with a JSON body: the body is read and checked, a request handler runs, and its response is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mvllm.entrypoints.openai.client_request import ModelRequest
from mvllm.entrypoints.openai.common.api_router import APIRouter, Endpoint
from mvllm.entrypoints.openai.common.handler import Handler
from mvllm.entrypoints.openai.common.json_response import json_response
from mvllm.entrypoints.openai.common.openapi import request_body_schema, response_schema, response_types
from mvllm.entrypoints.openai.common.relaxation_header import set_relaxations
from mvllm.entrypoints.openai.common.request_body import BodyDecoder, BodyReader
from mvllm.entrypoints.openai.common.serving_context import ServingContext
from mvllm.entrypoints.openai.common.serving_models import OpenAIServingModels
from mvllm.entrypoints.openai.common.streaming_response import EventStreamResponse, cancel_on_disconnect
from mvllm.entrypoints.openai.server.rate_limits import RunningRequest, current_request
from mvllm.entrypoints.openai.server.server_state import ServerState
from mvllm.entrypoints.openai.server.settings import ServerSettings
from mvllm.entrypoints.openai.unsupported_fields import reject_unsupported_fields

R = TypeVar("R", bound=ModelRequest)
MakeHandler = Callable[[ServingContext, str, R], Handler]
"""Makes the handler of a request from the context, the model's name in the response and the body."""


class BodyRoutes:
    """Adds routes with a JSON body, and answers their requests.

    Args:
        state: The server's state.
        models: Names of the model and of LoRA adapters.
        settings: The server's.

    Attributes:
        reader: Reads bodies within the server's limits.
        send_timeout: Seconds for which a client may leave a stream unread.
        routes: The routes.
    """

    def __init__(
        self,
        state: ServerState,
        models: OpenAIServingModels,
        settings: ServerSettings,
    ) -> None:
        self.reader = BodyReader.from_settings(settings)
        self._state = state
        self._models = models
        self.send_timeout = settings.send_timeout
        self.routes: list[Route] = []
        self._decoders: dict[type[ModelRequest], BodyDecoder[Any]] = {}
        self._response_types: list[Any] = []

    def add(
        self,
        router: APIRouter,
        path: str,
        body_type: type[ModelRequest],
        endpoint: Endpoint,
        summary: str,
        example: Mapping[str, Any] | None = None,
        *,
        response: Any = None,
    ) -> None:
        """Adds a POST route whose endpoint reads the body itself, with `decode`.

        Args:
            router: Core's router, or one of FastAPI.
            example: A body, for the API's description.
            response: The type of its response, or types by media type, as for `response_schema`; for the description.
        """
        self._decoders[body_type] = BodyDecoder(body_type)
        extra = request_body_schema(body_type, example)
        if response is not None:
            extra |= response_schema(response)
            self._response_types += response_types(response)
        router.add_api_route(path, endpoint, methods=["POST"], summary=summary, openapi_extra=extra)
        self.routes.append(cast(Route, router.routes[-1]))

    def add_handler(
        self,
        router: APIRouter,
        path: str,
        body_type: type[R],
        make_handler: MakeHandler[R],
        summary: str,
        example: Mapping[str, Any] | None = None,
        *,
        with_adapters: bool = True,
        response: Any = None,
    ) -> None:
        """Adds a POST route whose requests have a handler each.

        Args:
            example: A body, for the API's description.
            with_adapters: Whether a request may name a LoRA adapter as its model.
            response: As for `add`.
        """

        async def endpoint(request: Request) -> Response:
            return await self.run_handler(request, body_type, make_handler, with_adapters=with_adapters)

        self.add(router, path, body_type, endpoint, summary, example, response=response)

    @property
    def body_types(self) -> list[Any]:
        """The types of the bodies of all routes' requests and responses."""
        return [*self._decoders, *self._response_types]

    async def decode(self, request: Request, body_type: type[R]) -> R:
        """The body of a request to one of the routes.

        Raises:
            APIError: The body is not acceptable.
            RequestError: It has a field that is not supported.
            ClientDisconnected: The client left.
        """
        body: R = await self.reader.decode(request, self._decoders[body_type])
        reject_unsupported_fields(body)
        return body

    async def decode_for_model(
        self, request: Request, body_type: type[R], *, with_adapters: bool = True
    ) -> tuple[ServingContext, str, R]:
        """What runs a request, the name of the model in its response, and its body.

        Raises:
            As `decode`.
            APIError: The server does not accept requests (503), or has no such model (404).
        """
        context = self._state.context
        body = await self.decode(request, body_type)
        return context, self._models.resolve_name(body.model, with_adapters=with_adapters), body

    async def run_handler(
        self, request: Request, body_type: type[R], make_handler: MakeHandler[R], *, with_adapters: bool = True
    ) -> Response:
        """Runs a handler until the response is complete, or, for a stream, until the engine has its prompts.

        Raises:
            As `decode_for_model` and the handler.
        """
        context, model, body = await self.decode_for_model(request, body_type, with_adapters=with_adapters)
        return await self.run(request, make_handler(context, model, body), model)

    async def run(self, request: Request, handler: Handler, model: str) -> Response:
        """As `run_handler`, with the handler of a body that has been read.

        Args:
            model: The model's name; that of an adapter selects it.

        Raises:
            As the handler.
        """
        admitted = self.admit(request, handler, model)
        is_streaming = False
        try:
            async with cancel_on_disconnect(request.receive):
                await handler.start()
                admitted.count_tokens()
                set_relaxations(request.scope, handler.relaxations)
                if not handler.is_streaming:
                    body_bytes = await handler.full_response()
                    admitted.count_tokens()  # before the headers of the response
                    return json_response(body_bytes)
            is_streaming = True
            handler.connection = request.scope.get("mvllm.connection")
            # It calls `end`, however it ends.
            response = EventStreamResponse(handler.stream(), self.send_timeout, admitted.end, handler.stream_format)
            admitted.set_response(response)
            return response
        finally:
            if not is_streaming:
                admitted.end()

    def admit(self, request: Request, handler: Handler, model: str, *, in_background: bool = False) -> AdmittedRequest:
        """Counts a request as in flight for the server, until it is ended.

        Args:
            model: As for `run`.
            in_background: Whether it continues after its response, and so counts for its key until it is ended.
        """
        handler.lora_request = self._models.lora_request(model)
        name = f"{request.method} {request.url.path}"
        return AdmittedRequest(self._state, handler, current_request(), name, in_background=in_background)


class AdmittedRequest:
    """A request in flight. To be ended, however its handler ends.

    Args:
        counted: The request of its key; None without limits.
        name: What it is, for the watchdog's report.
        in_background: As for `BodyRoutes.admit`.
    """

    def __init__(
        self, state: ServerState, handler: Handler, counted: RunningRequest | None, name: str, *, in_background: bool
    ) -> None:
        self._state = state
        self._handler = handler
        self._counted = counted
        self._in_background = in_background
        if counted is not None and in_background:
            counted.hold()
        self._watchdog = state.watchdog
        self._response: EventStreamResponse | None = None
        self._watched = None if state.watchdog is None else state.watchdog.begin(name, self._waits_for_client)
        state.request_started()

    def set_response(self, response: EventStreamResponse) -> None:
        """The answer is a stream, which may wait until its client reads."""
        self._response = response

    def count_tokens(self) -> None:
        """Counts the tokens so far for the request's key."""
        if self._counted is not None:
            self._counted.set_tokens(self._handler.num_tokens)

    def _waits_for_client(self) -> bool:
        return self._response is not None and self._response.waits_for_client

    def end(self) -> None:
        """Closes the handler. To be called once."""
        if self._watchdog is not None and self._watched is not None:
            self._watchdog.end(self._watched)
        self._handler.close()
        self._state.request_finished()
        self.count_tokens()
        if self._counted is not None and self._in_background:
            self._counted.end()

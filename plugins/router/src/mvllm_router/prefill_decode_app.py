"""The application of `mvllm router`: prompts are computed by one engine, and continued by another.

    client ──> router ──1──> prefill engine     computes the prompt, answers with kv_transfer_params
                  └────2──> decode engine       fetches the blocks of the prompt, generates the response

Nothing depends on the first step: if no prefill engine answers, the decode engine computes the prompt. If no decode
engine can be reached, a prefill engine generates the response.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Message, Receive, Scope, Send

from mvllm.extension_api import APIError, get_logger
from mvllm.extension_api.http_connection import ConnectionLostError, HTTPConnection
from mvllm.extension_api.server import (
    CLIENT_CLOSED_REQUEST,
    BodyReader,
    ClientDisconnected,
    HTTPMetrics,
    ServerSettings,
    cancel_on_disconnect,
)
from mvllm_router.proxy import Proxy, request_head
from mvllm_router.remote_server import RemoteServer, by_load

logger = get_logger(__name__)

GENERATION_PATHS = ("/v1/completions", "/v1/chat/completions")
"""Paths whose requests have a prompt that another engine can compute."""

_ONLY_FOR_OUTPUT = (
    *("stream", "stream_options", "n", "best_of", "use_beam_search", "beam_width", "length_penalty", "early_stopping"),
    *("min_tokens", "max_tokens", "max_completion_tokens", "echo", "logprobs", "top_logprobs", "prompt_logprobs"),
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("return_token_ids", "return_weight_versions", "thinking_token_budget", "kv_transfer_params"),
)
"""Fields of a request that its prompt does not depend on."""
_MAX_PREFILL_RESPONSE_BYTES = 16 << 20
_UNAVAILABLE = 503
_TRIES = 2
"""Of one server: a kept connection may have been closed in the meantime."""

_Fields = dict[str, msgspec.Raw]


class PrefillDecodeApp:
    """The ASGI application.

    Args:
        prefill: Engines that compute prompts.
        decode: Engines that generate.
        settings: Limits of bodies and of waiting clients.
        prefill_timeout: Seconds that a prefill engine may take; then the decode engine computes the prompt.
        metrics: The router's metrics.

    Attributes:
        is_draining: Whether new requests are refused, because the router shuts down.
        num_requests: Requests in progress.
    """

    def __init__(
        self,
        prefill: Sequence[RemoteServer],
        decode: Sequence[RemoteServer],
        settings: ServerSettings,
        prefill_timeout: float,
        metrics: HTTPMetrics,
    ) -> None:
        self.is_draining = False
        self.num_requests = 0
        self._prefill = prefill
        self._decode = decode
        self._prefill_timeout = prefill_timeout
        self._metrics = metrics
        self._proxy = Proxy(settings.send_timeout)
        self._reader = BodyReader.from_settings(settings)
        self._turn = itertools.count()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        response = await self._own_response(scope["method"], scope["path"])
        if response is not None:
            scope["route"] = OwnRoute(scope["path"])
            await response(scope, receive, send)
            return
        if self.is_draining:
            raise APIError(503, "The router is shutting down.", code="shutting_down", retry_after=1)
        has_started = False

        async def send_noting_start(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        self.num_requests += 1
        try:
            await self._serve(Request(scope, receive, send), send_noting_start)
        except ClientDisconnected:
            if not has_started:
                await Response(status_code=CLIENT_CLOSED_REQUEST)(scope, receive, send)
        finally:
            self.num_requests -= 1

    async def _own_response(self, method: str, path: str) -> Response | None:
        if method != "GET":
            return None
        if path == "/metrics":
            return Response(self._metrics.exposition(), media_type=HTTPMetrics.content_type)
        if path == "/health/live":
            return PlainTextResponse("ok")
        if path in ("/health", "/health/ready"):
            ready = not self.is_draining and await self._is_any_ready()
            return PlainTextResponse("ok" if ready else "no engine is ready", 200 if ready else _UNAVAILABLE)
        return None

    async def _is_any_ready(self) -> bool:
        """Whether an engine that can generate answers that it is ready."""
        for server in by_load([*self._decode, *self._prefill]):
            head = b"GET /health/ready HTTP/1.1\r\nhost: %s\r\n\r\n" % server.name
            try:
                async with asyncio.timeout(2), server.connection() as connection:
                    connection.send(head, b"")
                    status, _ = await connection.read_head()
                    await _read_body(connection)
                    if status == 200:
                        return True
            except (ConnectionLostError, TimeoutError):
                server.avoid()
        return False

    # --- requests to engines

    async def _serve(self, request: Request, send: Send) -> None:
        scope = request.scope
        scope["route"] = OwnRoute(scope["path"] if scope["path"] in GENERATION_PATHS else "other")
        if scope["method"] == "POST" and scope["path"] in GENERATION_PATHS:
            body = await self._reader.read(request)
            async with cancel_on_disconnect(request.receive):
                fields = _fields(body)
                params = None if fields is None else await self._compute_prompt(scope, fields)
                if fields is not None and (params is not None or "kv_transfer_params" in fields):
                    with_blocks = {name: v for name, v in fields.items() if name != "kv_transfer_params"}
                    body = msgspec.json.encode(with_blocks)
                    if params is not None:
                        with_blocks["kv_transfer_params"] = params
                    await self._generate(scope, send, msgspec.json.encode(with_blocks), body)
                else:
                    await self._generate(scope, send, body, body)
        else:
            body = await self._reader.read_any(request)
            async with cancel_on_disconnect(request.receive):
                await self._generate(scope, send, body, body)

    async def _compute_prompt(self, scope: Scope, fields: _Fields) -> msgspec.Raw | None:
        """Has a prefill engine compute the prompt. Returns its `kv_transfer_params`; None if there are none."""
        body = _prefill_body(scope["path"], fields)
        for server in self._in_turn(self._prefill):
            try:
                async with asyncio.timeout(self._prefill_timeout):
                    status, content = await self._ask(server, scope, body)
            except ConnectionLostError:
                server.avoid()
                logger.warning("The prefill engine at %s cannot be reached or has ended.", server.url)
                continue
            except TimeoutError:
                logger.warning("The prefill engine at %s took more than %g s.", server.url, self._prefill_timeout)
                return None
            if status == _UNAVAILABLE:
                continue
            return _transfer_params(content) if status == 200 else None
        return None

    def _in_turn(self, servers: Sequence[RemoteServer]) -> list[RemoteServer]:
        """The servers by their load, those with the same load in turn."""
        start = next(self._turn) % max(1, len(servers))
        return by_load([*servers[start:], *servers[:start]])

    async def _ask(self, server: RemoteServer, scope: Scope, body: bytes) -> tuple[int, bytes]:
        """Status and body of a server's response."""
        for is_last_try in (False, True):
            try:
                with server.counted():
                    async with server.connection() as connection:
                        connection.send(request_head(scope, scope["query_string"], len(body), server.name), body)
                        status, _ = await connection.read_head()
                        return status, await _read_body(connection)
            except ConnectionLostError:
                if is_last_try:
                    raise
        raise AssertionError

    async def _generate(self, scope: Scope, send: Send, body: bytes, body_without_blocks: bytes) -> None:
        """Has a decode engine answer, or if none can, a prefill engine.

        Args:
            body: For decode engines.
            body_without_blocks: For prefill engines.
        """
        bodies = [(server, body) for server in self._in_turn(self._decode)]
        bodies += [(server, body_without_blocks) for server in self._in_turn(self._prefill)]
        for position, (server, its_body) in enumerate(bodies):
            if await self._try_to_answer(server, scope, send, its_body, is_last=position + 1 == len(bodies)):
                return
        raise APIError(
            _UNAVAILABLE,
            "No engine can be reached at the moment. Send the request again.",
            code="no_engine",
            retry_after=1,
        )

    async def _try_to_answer(
        self, server: RemoteServer, scope: Scope, send: Send, body: bytes, *, is_last: bool
    ) -> bool:
        """Whether a server has answered. If it has not, the client has received nothing."""
        for _ in range(_TRIES):
            try:
                with server.counted():
                    async with server.connection() as connection:
                        connection.send(request_head(scope, scope["query_string"], len(body), server.name), body)
                        status, _ = await connection.read_head()
                        if status == _UNAVAILABLE and not is_last:
                            return False
                        await self._proxy.respond(connection, scope, send)
                        return True
            except ConnectionLostError:
                continue
        server.avoid()
        logger.warning("The engine at %s cannot be reached or has ended.", server.url)
        return False


class OwnRoute:
    """What the log and the metrics read of a route."""

    def __init__(self, path: str) -> None:
        self.path = path


def _fields(body: bytes) -> _Fields | None:
    """The fields of a body; None if it is no object: an engine answers with the error."""
    try:
        return msgspec.json.decode(body, type=_Fields)
    except msgspec.DecodeError:
        return None


def _prefill_body(path: str, fields: _Fields) -> bytes:
    prompt: dict[str, Any] = {name: value for name, value in fields.items() if name not in _ONLY_FOR_OUTPUT}
    prompt["max_completion_tokens" if path.endswith("/chat/completions") else "max_tokens"] = 1
    prompt["kv_transfer_params"] = {"do_remote_decode": True}
    return msgspec.json.encode(prompt)


class _PrefillResponse(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


def _transfer_params(content: bytes) -> msgspec.Raw | None:
    try:
        params = msgspec.json.decode(content, type=_PrefillResponse).kv_transfer_params
    except msgspec.DecodeError:
        return None
    return None if bytes(params) == b"null" else params


async def _read_body(connection: HTTPConnection) -> bytes:
    parts, length = [], 0
    async for part in connection.read_body():
        parts.append(part)
        length += len(part)
        if length > _MAX_PREFILL_RESPONSE_BYTES:
            raise ConnectionLostError
    return b"".join(parts)

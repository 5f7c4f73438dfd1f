"""The ingress: chooses the model of a request, forwards it to a replica, and sends the response as it arrives.

What a lost replica means for a request that it computed:

    nothing was sent to the client     the request is repeated on another replica (`retries`), then 503 with Retry-After
    a stream has begun                 the stream ends with an error event, whose status is 503
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from mvllm.extension_api import APIError, api_formats, error_response, get_logger, set_api_format
from mvllm_ray.serve.model_server import ServerLostError
from mvllm_ray.serve.routing import ForwardedRequest, cache_root, expected_output_tokens, prompt_units
from mvllm_ray.serve.settings import IngressSettings

logger = get_logger("mvllm.ray.serve")

_METHODS = frozenset({"DELETE", "GET", "HEAD", "POST"})
_NOT_FORWARDED = frozenset({"connection", "content-length", "expect", "host", "keep-alive", "te", "transfer-encoding"})
_STREAMS = ("text/event-stream", "application/x-ndjson")
_READY_SECONDS = 5.0
_RETRY_SECONDS = 1


class Ingress:
    """The class of the ingress deployment.

    Args:
        names: The names of each model.
        settings: Of the ingress, as a JSON object.
        handles: One for each model.
    """

    def __init__(self, names: list[list[str]], settings: dict[str, Any], *handles: DeploymentHandle) -> None:
        self._settings = msgspec.convert(settings, IngressSettings)
        self._handles = [handle.options(method_name="forward", stream=True) for handle in handles]
        self._names = [each[0] for each in names]
        self._formats = api_formats()
        self._by_name = {name: i for i, each in enumerate(names) for name in each}

    async def __call__(self, request: Request) -> Response:
        """Answers a request. Called by Serve."""
        set_api_format(request.scope, self._formats)
        try:
            if request.method not in _METHODS:
                raise APIError(405, "This path does not accept this method.", code="method_not_allowed")
            return await self._respond(request)
        except APIError as e:
            return error_response(e, request.scope)

    async def _respond(self, request: Request) -> Response:
        path = "/" + request.scope["path"].removeprefix(request.scope.get("root_path", "")).lstrip("/")
        match request.method, path:
            case "GET" | "HEAD" | "POST", "/health/live" | "/ping":
                return JSONResponse({"status": "ok"})
            case "GET" | "HEAD", "/health" | "/health/ready":
                return await self._readiness()
            case "GET", "/v1/models":
                return await self._list_models(request)
            case "GET", "/metrics":
                raise APIError(
                    404,
                    "Each replica has metrics of its own. Ray exports those of Serve and of replicas (ray_serve_*).",
                )
        body = await self._read_body(request)
        index, forwarded = self._route(request, path, body)
        return await self._forward(self._handles[index], forwarded, request)

    # --- forwarding

    def _route(self, request: Request, path: str, body: bytes) -> tuple[int, ForwardedRequest]:
        """The index of the model, and the request for its replica."""
        content: Any = None
        if body and request.method == "POST":
            try:
                content = msgspec.json.decode(body)
            except (msgspec.DecodeError, RecursionError):
                content = None  # the model's server refuses it
        name = content.get("model") if isinstance(content, dict) else None
        if path.startswith("/v1/models/"):
            name = path.removeprefix("/v1/models/")
        index = 0
        if isinstance(name, str) and name:
            found = self._by_name.get(name)
            if found is None and ":" in name:  # clients of Ollama add a tag
                found = self._by_name.get(name.partition(":")[0])
            if found is None:
                raise APIError(404, f"The model {name[:200]!r} does not exist.", param="model", code="model_not_found")
            index = found
        query = request.url.query
        headers = [(key, value) for key, value in request.headers.items() if key not in _NOT_FORWARDED]
        forwarded = ForwardedRequest(request.method, f"{path}?{query}" if query else path, headers, body)
        forwarded.prompt = prompt_units(content)
        forwarded.num_output_tokens = expected_output_tokens(content)
        forwarded.root = cache_root(content, name if isinstance(name, str) else "")
        return index, forwarded

    async def _forward(self, handle: DeploymentHandle, forwarded: ForwardedRequest, request: Request) -> Response:
        for attempt in range(self._settings.retries + 1):
            call = _Call(handle, forwarded)
            try:
                status, headers = await call.start()
                kind = next((value for key, value in headers if key.lower() == "content-type"), "")
                if kind.startswith(_STREAMS):
                    response: Response = StreamingResponse(_stream(call, request, kind), status)
                else:
                    response = Response(await call.read(), status)
                response.raw_headers = [
                    (key.lower().encode("latin-1"), value.encode("latin-1"))
                    for key, value in headers
                    if key.lower() != "content-length"
                ]
                if not isinstance(response, StreamingResponse):
                    response.raw_headers.append((b"content-length", str(len(response.body)).encode()))
                return response
            except (BackPressureError, DeploymentUnavailableError) as e:
                call.close()
                raise _unavailable("The model has no replica for this request now.") from e
            except Exception as e:
                call.close()
                if not _is_loss(e):
                    raise
                logger.warning("A replica was lost (%s), attempt %d: %s", type(e).__name__, attempt + 1, e)
                failure = e
            except BaseException:  # the client has left
                call.close()
                raise
        raise _unavailable("The replica that computed this request was lost.") from failure

    async def _read_body(self, request: Request) -> bytes:
        limit = self._settings.max_body_bytes
        parts, size = [], 0
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if size > limit:
                raise APIError(413, f"The body is longer than {limit} bytes.", code="body_too_large", close=True)
        return b"".join(parts)

    # --- what concerns all models

    async def _readiness(self) -> Response:
        """200 if every model has a replica that accepts requests."""
        answers = await asyncio.gather(
            *(self._ask(each, "/health/ready", [], _READY_SECONDS) for each in self._handles)
        )
        waiting = [name for name, answer in zip(self._names, answers) if answer is None or answer[0] != 200]
        if waiting:
            return JSONResponse({"status": f"no replica is ready for {', '.join(waiting)}"}, 503)
        return JSONResponse({"status": "ok"})

    async def _list_models(self, request: Request) -> Response:
        headers = [(key, value) for key, value in request.headers.items() if key not in _NOT_FORWARDED]
        answers = await asyncio.gather(
            *(self._ask(each, "/v1/models", headers, _READY_SECONDS) for each in self._handles)
        )
        cards: list[Any] = []
        for name, answer in zip(self._names, answers):
            if answer is None:  # it starts, or has been scaled to none
                cards.append({"id": name, "object": "model", "owned_by": "mvllm"})
            elif answer[0] != 200:
                return Response(answer[1], answer[0], media_type="application/json")
            else:
                cards += msgspec.json.decode(answer[1])["data"]
        return JSONResponse({"object": "list", "data": cards})

    async def _ask(
        self, handle: DeploymentHandle, target: str, headers: list[tuple[str, str]], limit: float
    ) -> tuple[int, bytes] | None:
        """Status and body of a GET request to any replica; None if none answers in time."""
        call = _Call(handle, ForwardedRequest("GET", target, headers, b""))
        try:
            async with asyncio.timeout(limit):
                status, _ = await call.start()
                return status, await call.read()
        except (TimeoutError, RayError, ServerLostError, BackPressureError, DeploymentUnavailableError):
            return None
        finally:
            call.close()


class _Call:
    """One request to one replica. Every way out of it closes it."""

    def __init__(self, handle: DeploymentHandle, request: ForwardedRequest) -> None:
        self._request = request
        self._parts = handle.remote(request)
        self._has_ended = False

    async def start(self) -> tuple[int, list[tuple[str, str]]]:
        """Waits for status and headers of the response."""
        head: tuple[int, list[tuple[str, str]]] = await anext(self._parts)
        return head

    async def read(self) -> bytes:
        """The whole body."""
        return b"".join([part async for part in self])

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """The parts of the body."""
        try:
            async for part in self._parts:
                self._request.first_output()
                yield part
            self._has_ended = True
        finally:
            self.close()

    def close(self) -> None:
        """Aborts the request if it has not ended. Idempotent."""
        self._request.finish()
        if not self._has_ended:
            self._has_ended = True
            self._parts.cancel()


async def _stream(call: _Call, request: Request, kind: str) -> AsyncIterator[bytes]:
    """The parts of a streamed response, and an error if its replica is lost."""
    try:
        async for part in call:
            yield part
    except Exception as e:
        if not _is_loss(e):
            raise
        logger.warning("A replica was lost in the middle of a stream (%s): %s", type(e).__name__, e)
        error = _unavailable("The replica that computed this response was lost. Send the request again.")
        body = bytes(error_response(error, request.scope).body)
        if not kind.startswith("text/event-stream"):
            yield body + b"\n"
        elif body.startswith(b'{"type":"error"'):  # Anthropic's format
            yield b"event: error\ndata: " + body + b"\n\n"
        else:
            yield b"data: " + body + b"\n\ndata: [DONE]\n\n"
    finally:
        call.close()


def _is_loss(error: Exception) -> bool:
    """Whether the replica, its node or its server has ended, rather than failed at the request."""
    if isinstance(error, (ServerLostError, ReplicaUnavailableError)):
        return True
    return isinstance(error, RayError) and not isinstance(error, RayTaskError)


def _unavailable(message: str) -> APIError:
    return APIError(503, message, code="replica_unavailable", retry_after=_RETRY_SECONDS)

"""Runs a file of requests in OpenAI's batch format: one JSON line for each request and for each response.

    {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
 -> {"id": ..., "custom_id": "1", "response": {"status_code": 200, "request_id": ..., "body": {...}}, "error": null}

Lines are read only as requests finish, so a file may have any length. A response is written when it is complete, so the
order differs from that of the requests; `custom_id` identifies them. A request that the server would reject gets the
server's status and body. A line that is not a request gets `response: null` and an `error`.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

import msgspec

from mvllm.extension_api import APIError, RequestError
from mvllm.extension_api.http import (
    BodyDecoder,
    ChatCompletionHandler,
    ChatCompletionRequest,
    CompletionHandler,
    CompletionRequest,
    EmbeddingRequest,
    OpenAIServingModels,
    QueueFullError,
    RequestHandler,
    ServingContext,
    UnknownFields,
    embedding_handler,
    error_body,
    reject_unsupported_fields,
    to_api_error,
)

MAX_LINE_BYTES = 64 << 20
_RETRY_SECONDS = 0.05  # until the next attempt if the engine's queue is full


class BatchRequestInput(msgspec.Struct):
    """A line of the input file."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class BatchResponseData(msgspec.Struct):
    """The HTTP response of a request."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchRequestError(msgspec.Struct):
    """Why a line is not a request."""

    code: str
    message: str


class BatchRequestOutput(msgspec.Struct):
    """A line of the output file."""

    id: str
    custom_id: str | None
    response: BatchResponseData | None
    error: BatchRequestError | None


@dataclass
class BatchCounts:
    """Number of requests, and of those that failed."""

    total: int = 0
    failed: int = 0


class BatchRunner:
    """Runs the requests of a file.

    Args:
        context: The engine, and what request handlers share.
        models: Names of the model that requests may use.
        max_concurrency: Most requests that run, and lines in memory, at a time.
        on_done: Called after each request.
        unknown_fields: Handles unknown fields of bodies.
    """

    def __init__(
        self,
        context: ServingContext,
        models: OpenAIServingModels,
        *,
        max_concurrency: int,
        on_done: Callable[[], None] = lambda: None,
        unknown_fields: UnknownFields | None = None,
    ) -> None:
        self._context = context
        self._engine = context.engine
        self._models = models
        self._max_concurrency = max_concurrency
        self._on_done = on_done
        self._unknown_fields = unknown_fields or UnknownFields()
        self._lines = msgspec.json.Decoder(BatchRequestInput)
        self._handlers: dict[str, tuple[BodyDecoder[Any], Callable[..., RequestHandler]]] = {
            "/v1/chat/completions": (BodyDecoder(ChatCompletionRequest), ChatCompletionHandler),
            "/v1/completions": (BodyDecoder(CompletionRequest), CompletionHandler),
            "/v1/embeddings": (BodyDecoder(EmbeddingRequest), embedding_handler),
        }

    async def run(self, source: IO[bytes], target: IO[bytes]) -> BatchCounts:
        """Runs the request of each line of `source`, and writes a line to `target`. Empty lines are skipped.

        Raises:
            EngineDeadError: The engine stopped. Running requests have error responses, later ones none.
        """
        counts = BatchCounts()
        slots = asyncio.Semaphore(self._max_concurrency)
        encode = msgspec.json.Encoder().encode

        async def run_line(data: bytes) -> None:
            try:
                output = await self._process_line(data)
            finally:
                slots.release()
            counts.total += 1
            counts.failed += output.response is None or output.response.status_code != 200
            target.write(encode(output) + b"\n")
            self._on_done()

        async with asyncio.TaskGroup() as group:
            while not self._engine.errored:
                await slots.acquire()
                data = await asyncio.to_thread(_read_line, source)
                if data is None:
                    break
                if data.strip():
                    group.create_task(run_line(data))
                else:
                    slots.release()
        target.flush()
        if self._engine.dead_error is not None:
            raise self._engine.dead_error
        return counts

    async def _process_line(self, data: bytes) -> BatchRequestOutput:
        output_id = f"batch_req_{uuid.uuid4().hex}"
        try:
            if len(data) > MAX_LINE_BYTES:
                raise ValueError(f"The line is longer than {MAX_LINE_BYTES} bytes")
            line = self._lines.decode(data)
        except (ValueError, RecursionError) as e:  # msgspec's errors are ValueErrors
            failure = BatchRequestError("invalid_line", f"The line is not a valid request: {str(e).replace('`', '')}.")
            return BatchRequestOutput(output_id, _custom_id(data), None, failure)
        request_id = uuid.uuid4().hex
        try:
            status, body = 200, await self._respond(line)
        except Exception as e:  # noqa: BLE001  (to_api_error logs it)
            error = to_api_error(e)
            status = error.status
            body = error_body(error.status, error.message, param=error.param, code=error.code)
        return BatchRequestOutput(
            output_id, line.custom_id, BatchResponseData(status, request_id, msgspec.Raw(body)), None
        )

    async def _respond(self, line: BatchRequestInput) -> bytes:
        """The body of the response to a request.

        Raises:
            APIError, RequestError, MvllmError: As the server's routes.
        """
        if line.method != "POST":
            raise APIError(405, f"method is {line.method[:20]!a}; it must be 'POST'.", param="method")
        while True:
            handler = self._make_handler(line)
            try:
                await handler.start()
                return await handler.full_response()
            except QueueFullError:  # running requests will leave it
                await asyncio.sleep(_RETRY_SECONDS)
            finally:
                handler.close()

    def _make_handler(self, line: BatchRequestInput) -> RequestHandler:
        route = self._handlers.get(line.url)
        if route is None:
            raise APIError(
                404,
                f"url is {line.url[:60]!a}; a batch may have '/v1/chat/completions', '/v1/completions' and "
                "'/v1/embeddings'.",
                param="url",
                code="invalid_url",
            )
        decoder, make_handler = route
        request = decoder.decode(bytes(line.body), self._unknown_fields)
        if getattr(request, "stream", None):
            raise RequestError("stream is not supported in a batch; leave it out.", parameter="stream")
        reject_unsupported_fields(request)
        return make_handler(self._context, self._models.resolve_name(request.model), request)


def _read_line(source: IO[bytes]) -> bytes | None:
    """The next line, or more than MAX_LINE_BYTES of one that is longer; None at the end."""
    data = source.readline(MAX_LINE_BYTES + 1)
    if len(data) > MAX_LINE_BYTES and not data.endswith(b"\n"):
        while (rest := source.readline(1 << 20)) and not rest.endswith(b"\n"):
            pass
    return data or None


def _custom_id(data: bytes) -> str | None:
    """The `custom_id` of a line that is not a valid request, if the line is JSON."""
    try:
        found = msgspec.json.decode(data)
    except (ValueError, RecursionError):
        return None
    name = found.get("custom_id") if isinstance(found, dict) else None
    return name if isinstance(name, str) else None

"""`POST /v1/embeddings`: vectors of one or several inputs."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Sequence
from typing import Any, cast

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mvllm.engine.async_llm import AsyncLLM
from mvllm.engine.pooling_outputs import PoolingRequestOutput
from mvllm.engine.request_stream import RequestStream
from mvllm.entrypoints.openai.bodies import BodyDecoder, BodyReader
from mvllm.entrypoints.openai.errors import APIError, as_api_error
from mvllm.entrypoints.openai.events import encode
from mvllm.entrypoints.openai.openapi import body_of
from mvllm.entrypoints.openai.protocol import EmbeddingRequest
from mvllm.entrypoints.openai.served_models import ServedModels
from mvllm.entrypoints.openai.server_state import ServerState
from mvllm.entrypoints.openai.streams import while_connected
from mvllm.entrypoints.openai.text_work import TextWork
from mvllm.errors import PlatformError, RequestError
from mvllm.logging import get_logger
from mvllm.messages.inputs import PromptType
from mvllm.messages.pooling_params import PoolingParams

logger = get_logger(__name__)

MAX_INPUTS = 2048
"""Inputs in one request: each is a request of the engine's."""

_WRITTEN_AT_ONCE = 1 << 15
"""Components that are written in the loop's own thread; more would hold everybody up."""


class EmbeddingCall:
    """One request for vectors.

    Args:
        engine: What answers it.
        text_work: Where text is tokenized, and long answers are written.
        model: The model's name in the answer.
        request: As it was sent.

    Raises:
        RequestError: On construction: a setting is not acceptable.
    """

    def __init__(self, engine: AsyncLLM, text_work: TextWork, model: str, request: EmbeddingRequest) -> None:
        if request.encoding_format not in (None, "float", "base64"):
            raise RequestError("encoding_format must be 'float' or 'base64'.", parameter="encoding_format")
        if request.truncate_prompt_tokens is not None:
            raise RequestError(
                "truncate_prompt_tokens is not supported: inputs are not cut; shorten the input.",
                parameter="truncate_prompt_tokens",
            )
        self._engine = engine
        self._text_work = text_work
        self._model = model
        self._request = request
        self._id = f"embd-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._params = PoolingParams(dimensions=request.dimensions, normalize=request.normalize)
        self._streams: list[RequestStream] = []

    async def start(self) -> None:
        """Hands all inputs to the engine, or none.

        Raises:
            APIError, RequestError: An input or a setting is not acceptable.
            UnavailableError, EngineDeadError: The engine does not take it.
        """
        inputs = await self._make_inputs()
        try:
            self._streams = await self._engine.add_requests(
                inputs, [self._params] * len(inputs), self._id, priority=self._request.priority or 0, pooling=True
            )
        except RequestError as e:
            if e.parameter != "prompt":
                raise
            error = as_api_error(e)
            error.param = "input"  # as the field is called here
            raise error from e

    def close(self) -> None:
        """Drops what has not ended. Idempotent."""
        for stream in self._streams:
            stream.close()

    async def answer(self) -> bytes:
        """The whole answer.

        Raises:
            APIError: An input failed in the engine, or was dropped.
            UnavailableError: It was aborted.
            EngineDeadError: The engine has stopped.
        """
        outputs = [await _vector_of(stream) for stream in self._streams]
        if sum(len(output.outputs.data) for output in outputs) <= _WRITTEN_AT_ONCE:
            return self._write(outputs)
        return await self._text_work.run(lambda: self._write(outputs))

    def _write(self, outputs: Sequence[PoolingRequestOutput]) -> bytes:
        as_base64 = self._request.encoding_format == "base64"
        num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        data: list[msgspec.Raw] = []
        for index, output in enumerate(outputs):  # one at a time: in between, others get their turn
            vector = output.outputs.data
            shown: Any = base64.b64encode(vector.tobytes()).decode() if as_base64 else vector.tolist()
            data.append(msgspec.Raw(encode({"object": "embedding", "index": index, "embedding": shown})))
        return encode(
            {
                "id": self._id,
                "object": "list",
                "created": self._created,
                "model": self._model,
                "data": data,
                "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
            }
        )

    async def _make_inputs(self) -> list[PromptType]:
        inputs = _inputs(self._request.input)
        if len(inputs) > MAX_INPUTS:
            raise RequestError(
                f"One request may have {MAX_INPUTS} inputs; this one has {len(inputs)}. Send several requests.",
                parameter="input",
            )
        made: list[PromptType] = []
        for each in inputs:
            salt = {} if self._request.cache_salt is None else {"cache_salt": self._request.cache_salt}
            if isinstance(each, str) and self._request.add_special_tokens is False:
                ids = await self._text_work.encode(each, add_special_tokens=False)
                made.append(cast(PromptType, {"prompt_token_ids": ids, "prompt": each, **salt}))
            elif isinstance(each, str):
                made.append(cast(PromptType, {"prompt": each, **salt}))
            else:
                made.append(cast(PromptType, {"prompt_token_ids": each, **salt}))
        return made


class EmbeddingRoute:
    """The route, for whoever keeps the others.

    Args:
        state: Where the server is in its life.
        models: The names it answers to.
        bodies: Reads requests.
    """

    def __init__(self, state: ServerState, models: ServedModels, bodies: BodyReader) -> None:
        self._state = state
        self._models = models
        self._bodies = bodies
        self._decoder = BodyDecoder(EmbeddingRequest)

    def add_to(self, router: APIRouter) -> None:
        """Adds the route."""
        router.add_api_route(
            "/v1/embeddings",
            self.embeddings,
            methods=["POST"],
            summary="Make vectors of texts.",
            openapi_extra=body_of(EmbeddingRequest),
        )

    async def embeddings(self, request: Request) -> Response:
        """Vectors of the inputs."""
        engine = self._state.engine
        asked = self._decoder.decode(await self._bodies.read(request))
        call = EmbeddingCall(engine, self._state.text_work, self._models.check(asked.model), asked)
        self._state.enter()
        try:
            async with while_connected(request.receive):
                await call.start()
                answer = await call.answer()
            return Response(answer, media_type="application/json")
        finally:
            call.close()
            self._state.leave()


async def _vector_of(stream: RequestStream) -> PoolingRequestOutput:
    """The answer of one of the engine's requests."""
    async for output in stream:
        try:
            return PoolingRequestOutput.of(output)
        except PlatformError as e:
            logger.error("The engine could not finish a request: %s", e)
            raise APIError(
                500, "The engine could not finish the request; the server's log tells more.", code="engine_error"
            ) from e
    raise APIError(503, "The request was dropped before it had begun.", code="aborted", retry_after=1)


def _inputs(found: str | list[str | int | list[int]] | None) -> Sequence[str | list[int]]:
    """One or several inputs; a list of numbers is one.

    Raises:
        RequestError: There is none, or they are of different kinds.
    """
    if found is None:
        raise RequestError("input is missing.", parameter="input")
    if isinstance(found, str):
        return [found]
    if not found:
        raise RequestError("input is an empty list.", parameter="input")
    kinds = set(map(type, found))
    if kinds == {int}:
        return [cast("list[int]", found)]
    if kinds in ({str}, {list}):
        return cast("list[str | list[int]]", found)
    raise RequestError(
        "input must be a text, a list of texts, a list of token ids or a list of those; its entries are of several "
        "kinds.",
        parameter="input",
    )

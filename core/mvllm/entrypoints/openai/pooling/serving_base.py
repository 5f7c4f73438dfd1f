"""What requests for vectors and scores have in common: prompts that go into the engine together, and one answer."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar, cast

from mvllm.engine.async_llm import AsyncLLM
from mvllm.engine.frontend.pooling_outputs import PoolingRequestOutput
from mvllm.engine.frontend.request_output_stream import RequestOutputStream
from mvllm.entrypoints.openai.common.errors import APIError, to_api_error
from mvllm.entrypoints.openai.common.tokenizer_pool import TokenizerPool
from mvllm.entrypoints.openai.protocol import ClassificationRequest, EmbeddingRequest
from mvllm.errors import PlatformError, RequestError
from mvllm.logging import get_logger
from mvllm.messages.inputs import PromptType
from mvllm.messages.pooling_params import PoolingParams

logger = get_logger(__name__)

MAX_INPUTS = 2048
"""Inputs in one request: each is a request of the engine's."""

_MAX_INLINE_VALUES = 1 << 15
"""Numbers that are written in the loop's own thread; more would hold everybody up."""


class BasePoolingHandler(ABC):
    """One request that is answered once for all of its inputs.

    Args:
        engine: What answers it.
        tokenizer_pool: Where text is tokenized, and long answers are written.
        model: The model's name in the answer.
        kind: What its id begins with.
        priority: As in the request.

    Attributes:
        field: What the request calls its inputs.
    """

    field = "input"

    def __init__(
        self, engine: AsyncLLM, tokenizer_pool: TokenizerPool, model: str, kind: str, priority: int | None
    ) -> None:
        self._engine = engine
        self._text_work = tokenizer_pool
        self._model = model
        self._priority = priority or 0
        self._id = f"{kind}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._streams: list[RequestOutputStream] = []

    async def start(self) -> None:
        """Hands all inputs to the engine, or none.

        Raises:
            APIError, RequestError: An input or a setting is not acceptable.
            UnavailableError, EngineDeadError: The engine does not take it.
        """
        try:
            prompts, params = await self._make_requests()
            self._streams = await self._engine.add_requests(
                prompts, params, self._id, priority=self._priority, pooling=True
            )
        except RequestError as e:
            if e.parameter != "prompt":
                raise
            error = to_api_error(e)
            error.param = self.field  # as it is called here
            raise error from e

    def close(self) -> None:
        """Drops what has not ended. Idempotent."""
        for stream in self._streams:
            stream.close()

    async def full_response(self) -> bytes:
        """The whole answer.

        Raises:
            APIError: An input failed in the engine, or was dropped.
            UnavailableError: It was aborted.
            EngineDeadError: The engine has stopped.
        """
        outputs = [await _output_of(stream) for stream in self._streams]
        if sum(output.outputs.data.size for output in outputs) <= _MAX_INLINE_VALUES:
            return self._encode_response(outputs)
        return await self._text_work.run(lambda: self._encode_response(outputs))

    @abstractmethod
    async def _make_requests(self) -> tuple[Sequence[PromptType], Sequence[PoolingParams]]:
        """What the engine is asked, prompt by prompt.

        Raises:
            RequestError: It cannot be made of the request.
        """

    @abstractmethod
    def _encode_response(self, outputs: Sequence[PoolingRequestOutput]) -> bytes:
        """The answer's body."""

    def _common_fields(self) -> dict[str, Any]:
        """How answers begin."""
        return {"id": self._id, "object": "list", "created": self._created, "model": self._model}

    async def _prompts_of(
        self,
        found: str | list[str | int | list[int]] | None,
        *,
        add_special_tokens: bool | None,
        cache_salt: str | None = None,
    ) -> list[PromptType]:
        """Prompts of one or several inputs, which are texts or token ids."""
        inputs = check_num_inputs(_inputs(found, self.field), self.field)
        made: list[PromptType] = []
        for each in inputs:
            salt = {} if cache_salt is None else {"cache_salt": cache_salt}
            if isinstance(each, str) and add_special_tokens is False:
                ids = await self._text_work.encode(each, add_special_tokens=False)
                made.append(cast(PromptType, {"prompt_token_ids": ids, "prompt": each, **salt}))
            elif isinstance(each, str):
                made.append(cast(PromptType, {"prompt": each, **salt}))
            else:
                made.append(cast(PromptType, {"prompt_token_ids": each, **salt}))
        return made


_Request = TypeVar("_Request", bound=EmbeddingRequest | ClassificationRequest)


class InputListHandler(BasePoolingHandler, Generic[_Request]):
    """A request whose inputs, texts or token ids, are all asked the same. Classes set the two below."""

    _request: _Request
    _params: PoolingParams

    async def _make_requests(self) -> tuple[Sequence[PromptType], Sequence[PoolingParams]]:
        asked = self._request
        prompts = await self._prompts_of(
            asked.input, add_special_tokens=asked.add_special_tokens, cache_salt=asked.cache_salt
        )
        return prompts, [self._params] * len(prompts)


def check_num_inputs(inputs: Sequence[Any], field: str) -> Sequence[Any]:
    """Returns the inputs.

    Raises:
        RequestError: They are too many.
    """
    if len(inputs) > MAX_INPUTS:
        raise RequestError(
            f"One request may have {MAX_INPUTS} inputs; this one has {len(inputs)}. Send several requests.",
            parameter=field,
        )
    return inputs


def pooling_usage(outputs: Sequence[PoolingRequestOutput]) -> dict[str, int]:
    """How many tokens the prompts had."""
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


async def _output_of(stream: RequestOutputStream) -> PoolingRequestOutput:
    """The answer of one of the engine's requests."""
    async for output in stream:
        try:
            return PoolingRequestOutput.from_request_output(output)
        except PlatformError as e:
            logger.error("The engine could not finish a request: %s", e)
            raise APIError(
                500, "The engine could not finish the request; the server's log tells more.", code="engine_error"
            ) from e
    raise APIError(503, "The request was dropped before it had begun.", code="aborted", retry_after=1)


def _inputs(found: str | list[str | int | list[int]] | None, field: str) -> Sequence[str | list[int]]:
    """One or several inputs; a list of numbers is one.

    Raises:
        RequestError: There is none, or they are of different kinds.
    """
    if found is None:
        raise RequestError(f"{field} is missing.", parameter=field)
    if isinstance(found, str):
        return [found]
    if not found:
        raise RequestError(f"{field} is an empty list.", parameter=field)
    kinds = set(map(type, found))
    if kinds == {int}:
        return [cast("list[int]", found)]
    if kinds in ({str}, {list}):
        return cast("list[str | list[int]]", found)
    raise RequestError(
        f"{field} must be a text, a list of texts, a list of token ids or a list of those; its entries are of several "
        "kinds.",
        parameter=field,
    )

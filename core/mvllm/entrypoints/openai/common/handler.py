"""Request handlers: one HTTP request, run by the engine, and its response.

    Handler              what routes run
    └─ RequestHandler    one set of engine requests; each API has a direct subclass

What several APIs share, handlers have as objects, not as base classes:

    Conversation    prompt, sampling parameters, constraint and output parser of a chat completion request
    ChoicesStream   the stream of a list of `choices`
    UsageCounter    the tokens of the response
    InputList       the inputs of requests for embeddings, classes and others
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Any, ClassVar

from mvllm.entrypoints.openai.common.engine_requests import EngineRequests
from mvllm.entrypoints.openai.common.output_constraint import OutputConstraint
from mvllm.entrypoints.openai.common.serving_context import ServingContext
from mvllm.entrypoints.openai.common.streaming_response import SERVER_SENT_EVENTS, RequestConnection, StreamFormat
from mvllm.messages.inputs import PromptType
from mvllm.messages.lora import LoRARequest
from mvllm.messages.pooling_params import PoolingParams
from mvllm.messages.sampling_params import SamplingParams


class Handler(ABC):
    """Answers one HTTP request: `start`, then `full_response` or `stream`, and `close` however it ends.

    Attributes:
        lora_request: The LoRA adapter that the request names, to be set before `start`.
        is_streaming: Whether the response is to be streamed.
        stream_format: Format of what `stream` yields.
        connection: The connection of the request, if `stream` may write parts to it while its caller waits for more.
        relaxations: Once it has started: what of a JSON schema is not enforced while the output is generated.
    """

    lora_request: LoRARequest | None = None
    is_streaming = False
    stream_format: ClassVar[StreamFormat] = SERVER_SENT_EVENTS
    connection: RequestConnection | None = None
    relaxations: tuple[str, ...] = ()

    @abstractmethod
    async def start(self) -> None:
        """Adds the request's prompts to the engine.

        Raises:
            RequestError: The request is not acceptable.
            UnavailableError, EngineDeadError: The engine does not accept requests.
        """

    @abstractmethod
    def close(self) -> None:
        """Aborts what has not finished in the engine. Idempotent."""

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Tokens of its prompts and of what was generated so far."""

    @abstractmethod
    async def full_response(self) -> bytes:
        """The body of the response, when all of it is there.

        Raises:
            APIError: A sequence failed in the engine.
            EngineDeadError: The engine has stopped.
        """

    def stream(self) -> AsyncGenerator[bytes, None]:
        """The response part by part, in `stream_format`. An error while it is generated is a part, too.

        Called only if `is_streaming`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no stream")


class RequestHandler(Handler):
    """Answers a request with the outputs of prompts that it adds to the engine.

    Args:
        context: The engine, and what handlers share.
        model: The model's name in the response.
        id_prefix: Beginning of the response's id.
        priority: The request's; None is 0.
        constraint: Structured output that the request asks for.
    """

    def __init__(
        self,
        context: ServingContext,
        model: str,
        id_prefix: str,
        priority: int | None,
        constraint: OutputConstraint | None = None,
    ) -> None:
        self._context = context
        self._engine = context.engine
        self._model = model
        self._priority = priority or 0
        self._constraint = constraint
        self._id = f"{id_prefix}{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._started: EngineRequests | None = None

    async def start(self) -> None:
        """Adds the request's prompts to the engine. See Handler."""
        prompts, params = await self._build_engine_inputs()
        self._started = await EngineRequests.start(
            self._engine, self._id, prompts, params, self._priority, self._constraint, self.lora_request
        )
        self.relaxations = self._started.relaxations

    def close(self) -> None:
        """Aborts what has not finished in the engine. Idempotent."""
        if self._started is not None:
            self._started.close()

    @property
    def num_tokens(self) -> int:
        """Tokens of its prompts and of what was generated so far."""
        return 0 if self._started is None else self._started.num_tokens

    @abstractmethod
    async def _build_engine_inputs(self) -> tuple[Sequence[PromptType], SamplingParams | Sequence[PoolingParams]]:
        """The prompts, and the sampling parameters of all or the pooling parameters of each.

        Raises:
            RequestError: The request is not acceptable.
        """

    def _common_fields(self, object_type: str) -> dict[str, Any]:
        """The first fields of a response."""
        return {"id": self._id, "object": object_type, "created": self._created, "model": self._model}

    @property
    def _engine_requests(self) -> EngineRequests:
        assert self._started is not None, "start() comes first"
        return self._started

    @property
    def warning_fields(self) -> dict[str, Any]:
        """The response's `warnings`, if its JSON schema was not enforced whole."""
        return {} if self._started is None else self._started.warning_fields

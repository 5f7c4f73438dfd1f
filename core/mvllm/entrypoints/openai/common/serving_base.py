"""What calls of every kind have in common: an id, a way into the engine, and an end there."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence

from mvllm.engine.async_llm import AsyncLLM
from mvllm.entrypoints.openai.common.engine_requests import EngineRequests
from mvllm.entrypoints.openai.common.output_constraint import OutputConstraint
from mvllm.entrypoints.openai.common.usage import UsageCounter
from mvllm.entrypoints.openai.protocol import GenerationRequest
from mvllm.messages.inputs import PromptType
from mvllm.messages.lora import LoRARequest
from mvllm.messages.sampling_params import SamplingParams


class GenerationHandler(ABC):
    """One request that the engine answers, at once or piece by piece.

    Args:
        engine: What answers it.
        model: The model's name in the answer.
        request: As it was sent.
        kind: What its id begins with.
        params: How the engine is to answer it.
        form: What the outputs must look like.

    Attributes:
        lora_request: The adapter that the request names, to be set before `start`.
    """

    lora_request: LoRARequest | None = None

    def __init__(
        self,
        engine: AsyncLLM,
        model: str,
        request: GenerationRequest,
        kind: str,
        params: SamplingParams,
        form: OutputConstraint | None,
    ) -> None:
        self._engine = engine
        self._model = model
        self._request = request
        self._id = f"{kind}{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._params = params
        self._constraint = form
        self._usage = UsageCounter()
        self._engine_requests: EngineRequests | None = None

    async def start(self) -> None:
        """Hands the request to the engine.

        Raises:
            RequestError: It is not acceptable.
            UnavailableError, EngineDeadError: The engine does not take it.
        """
        prompts = await self._build_prompts()
        self._engine_requests = await EngineRequests.start(
            self._engine,
            self._id,
            prompts,
            self._params,
            self._request.priority,
            self._constraint,
            self.lora_request,
        )

    def close(self) -> None:
        """Ends the request in the engine, if that goes on with it. Idempotent."""
        if self._engine_requests is not None:
            self._engine_requests.close()

    @abstractmethod
    async def full_response(self) -> bytes:
        """The whole answer."""

    @abstractmethod
    def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer's events; an error is one of them."""

    @abstractmethod
    async def _build_prompts(self) -> Sequence[PromptType]:
        """What the model is to go on with.

        Raises:
            RequestError: It cannot be made of the request.
        """

    def _stream_usage_options(self) -> tuple[bool, bool]:
        """Whether a stream ends with how many tokens there were, and whether each of its chunks says so."""
        options = self._request.stream_options
        include = options is not None and bool(options.include_usage)
        return include, include and options is not None and bool(options.continuous_usage_stats)

"""What a caller gets back for a prompt that was made a vector of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from mvllm.engine.outputs import RequestMetrics, RequestOutput
from mvllm.errors import PlatformError, RequestError, UnavailableError

_Output = TypeVar("_Output")


@dataclass(slots=True)
class PoolingOutput:
    """One vector.

    Attributes:
        data: float32 [dimensions].
    """

    data: np.ndarray

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PoolingOutput) and np.array_equal(self.data, other.data)


@dataclass(slots=True)
class EmbeddingOutput:
    """One vector, as Python numbers.

    Attributes:
        embedding: Its components.
    """

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many components there are."""
        return len(self.embedding)


@dataclass(slots=True)
class PooledRequestOutput(Generic[_Output]):
    """The answer to a request for a vector.

    Attributes:
        request_id: As it was given.
        outputs: The vector.
        prompt: The prompt as text; None where only token ids were given.
        prompt_token_ids: The prompt as token ids.
        num_cached_tokens: Prompt tokens whose KV came from the prefix cache.
        finished: True: there are no pieces.
        metrics: When things happened.
    """

    request_id: str
    outputs: _Output
    prompt: str | None
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    metrics: RequestMetrics | None = None


class PoolingRequestOutput(PooledRequestOutput[PoolingOutput]):
    """What `encode` returns."""

    __slots__ = ()

    @classmethod
    def of(cls, output: RequestOutput) -> PoolingRequestOutput:
        """The answer in the final output of a request that was started with PoolingParams.

        Raises:
            RequestError, PlatformError: The request failed in the engine.
            UnavailableError: It was aborted.
        """
        [sequence] = output.outputs
        if output.pooled is None:
            if sequence.finish_reason == "abort":
                raise UnavailableError(f"The request {output.request_id!r} was aborted before there was a vector.")
            message = sequence.error or "The engine has made no vector of the prompt."
            if sequence.error_parameter is not None:
                raise RequestError(message, parameter=sequence.error_parameter)
            raise PlatformError(message)
        return cls(
            output.request_id,
            PoolingOutput(np.frombuffer(output.pooled, "<f4")),
            output.prompt,
            output.prompt_token_ids,
            output.num_cached_tokens,
            output.finished,
            output.metrics,
        )


class EmbeddingRequestOutput(PooledRequestOutput[EmbeddingOutput]):
    """What `embed` returns."""

    __slots__ = ()

    @classmethod
    def of(cls, output: PoolingRequestOutput) -> EmbeddingRequestOutput:
        """The same answer with Python numbers."""
        return cls(
            output.request_id,
            EmbeddingOutput(output.outputs.data.tolist()),
            output.prompt,
            output.prompt_token_ids,
            output.num_cached_tokens,
            output.finished,
            output.metrics,
        )

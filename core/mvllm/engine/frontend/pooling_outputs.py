"""Outputs of pooling requests: embeddings, classification scores and similarity scores."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import numpy as np

from mvllm.engine.frontend.outputs import RequestMetrics, RequestOutput
from mvllm.errors import PlatformError, RequestError, UnavailableError

_Output = TypeVar("_Output")


@dataclass(slots=True)
class PoolingOutput:
    """The pooled output of one prompt.

    Attributes:
        data: float32 [dimensions]; with the pooling type `all` [tokens, dimensions]; of a classifier [labels].
    """

    data: np.ndarray

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PoolingOutput) and np.array_equal(self.data, other.data)


@dataclass(slots=True)
class EmbeddingOutput:
    """One embedding, as Python floats.

    Attributes:
        embedding: Its components.
    """

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Number of components."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """The classification scores of one prompt.

    Attributes:
        probs: One score per label.
    """

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """The similarity of two texts.

    Attributes:
        score: The score of a cross-encoder, or the cosine similarity of two embeddings.
    """

    score: float


@dataclass(slots=True)
class PooledRequestOutput(Generic[_Output]):
    """The output of a pooling request.

    Attributes:
        request_id: The caller's id.
        outputs: The embedding, or the scores.
        prompt: The prompt as text; None if only token ids were given.
        prompt_token_ids: The prompt as token ids.
        num_cached_tokens: Prompt tokens whose KV came from the prefix cache.
        finished: True: there is one output.
        metrics: Times of the request's events.
        error: Why the request failed; its output is then empty. None if it has not.
        error_parameter: The request parameter that caused the error, if one did.
    """

    request_id: str
    outputs: _Output
    prompt: str | None
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    metrics: RequestMetrics | None = None
    error: str | None = None
    error_parameter: str | None = None


class PoolingRequestOutput(PooledRequestOutput[PoolingOutput]):
    """What `encode` returns."""

    __slots__ = ()

    @classmethod
    def from_request_output(cls, output: RequestOutput) -> PoolingRequestOutput:
        """Converts the final output of a request with PoolingParams.

        Raises:
            RequestError, PlatformError: The request failed in the engine.
            UnavailableError: It was aborted.
        """
        found = cls.with_error(output)
        if found.error_parameter is not None:
            raise RequestError(found.error or "", parameter=found.error_parameter)
        if found.error is not None:
            raise PlatformError(found.error)
        return found

    @classmethod
    def with_error(cls, output: RequestOutput) -> PoolingRequestOutput:
        """As `from_request_output`, but the output of a request that failed in the engine is empty and has an `error`.

        Raises:
            UnavailableError: The request was aborted.
        """
        [sequence] = output.outputs
        error = None
        if output.pooled is None:
            if sequence.finish_reason == "abort":
                raise UnavailableError(f"The request {output.request_id!r} was aborted before its output was computed.")
            error = sequence.error or "The engine returned no pooled output for the prompt."
        data = np.frombuffer(output.pooled or b"", "<f4")
        each_token = output.pooled_each_token and error is None
        return cls(
            output.request_id,
            PoolingOutput(data.reshape(len(output.prompt_token_ids), -1) if each_token else data),
            output.prompt,
            output.prompt_token_ids,
            output.num_cached_tokens,
            output.finished,
            output.metrics,
            error,
            sequence.error_parameter,
        )


class EmbeddingRequestOutput(PooledRequestOutput[EmbeddingOutput]):
    """What `embed` returns."""

    __slots__ = ()

    @classmethod
    def from_base(cls, output: PoolingRequestOutput) -> EmbeddingRequestOutput:
        """The same output with Python floats."""
        return cls(*_replace_output(output, EmbeddingOutput(output.outputs.data.tolist())))


class ClassificationRequestOutput(PooledRequestOutput[ClassificationOutput]):
    """What `classify` returns."""

    __slots__ = ()

    @classmethod
    def from_base(cls, output: PoolingRequestOutput) -> ClassificationRequestOutput:
        """The same output with Python floats."""
        return cls(*_replace_output(output, ClassificationOutput(output.outputs.data.tolist())))


class ScoringRequestOutput(PooledRequestOutput[ScoringOutput]):
    """What `score` returns. For two embedded texts, `prompt_token_ids` are those of both."""

    __slots__ = ()

    @classmethod
    def from_base(cls, output: PoolingRequestOutput) -> ScoringRequestOutput:
        """The same output as one score."""
        score = math.nan if output.error is not None else float(output.outputs.data.item())
        return cls(*_replace_output(output, ScoringOutput(score)))


def _replace_output(output: PoolingRequestOutput, outputs: _Output) -> tuple[Any, ...]:
    """The fields of `output`, with other `outputs`."""
    values = {field.name: getattr(output, field.name) for field in fields(output)} | {"outputs": outputs}
    return tuple(values.values())

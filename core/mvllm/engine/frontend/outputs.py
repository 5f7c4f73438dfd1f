"""RequestOutput and its parts: what callers receive for a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mvllm.messages.lora import LoRARequest

PositionLogprobMap = dict[int, "Logprob"]
"""Token id to log-probability at one position; the token at the position comes first."""

Positions = Sequence[PositionLogprobMap]
"""A list, or `FlatLogprobs` if the request has `flat_logprobs`."""


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token at one position.

    Attributes:
        logprob: Natural logarithm of its probability.
        rank: Its rank in the whole vocabulary, 1 = most probable.
        decoded_token: The token as text; None if the request is not detokenized.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence.

    Attributes:
        index: Its position among the `n` sequences of the request.
        text: The generated text; empty if the request is not detokenized.
        token_ids: The generated token ids, including the one that ended the sequence.
        cumulative_logprob: Sum of the log-probabilities of the generated tokens; None unless `logprobs` is set.
        logprobs: One entry per token, if requested.
        finish_reason: `stop`, `length`, `abort` or `error`; None while the sequence is unfinished.
        stop_reason: The stop string or stop token id that ended it; None for an end-of-sequence token.
        error: The error message, if finish_reason is `error`.
        error_parameter: The request parameter that caused the error, if one did.
        weight_versions: (version, number of tokens) of the weights that sampled `token_ids`, in their order. Weights
            have version 0 at the start, and a larger one after each update. Empty for a beam search.
        image_codes: The codes of `token_ids`, from 0; None for outputs of text.
        warnings: Of an ended sequence with a JSON schema that was not enforced whole while it was generated: what of it
            the text does not satisfy. Empty if it satisfies all of it; None for other sequences.
        conditional_logprobs: Of a request with a companion and `logprobs`, such as one with guidance: the
            log-probability of each of `token_ids` in the request's own logits. `logprobs` are of the combined ones.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Positions | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    error_parameter: str | None = None
    weight_versions: list[tuple[int, int]] = field(default_factory=list)
    image_codes: list[int] | None = None
    conditional_logprobs: list[float] | None = None
    warnings: list[str] | None = None

    @property
    def finished(self) -> bool:
        """Whether the sequence has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request's events, in seconds of the monotonic clock; None for events that have not happened.

    Attributes:
        arrival_time: The engine received the request.
        first_scheduled_time: It was first scheduled.
        first_token_time, last_token_time: Its first and its newest token reached the front end.
        finished_time: All its sequences had ended.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None

    def snapshot(self) -> RequestMetrics:
        """A copy that later events do not change."""
        return RequestMetrics(
            self.arrival_time,
            self.first_scheduled_time,
            self.first_token_time,
            self.last_token_time,
            self.finished_time,
        )


@dataclass(slots=True)
class RequestOutput:
    """The outputs of a request so far, or with output kind DELTA the new part.

    Attributes:
        request_id: The caller's id.
        prompt: The prompt as text; None if only token ids were given.
        prompt_token_ids: The prompt as token ids.
        prompt_logprobs: One entry per prompt token, None for the first; None unless requested.
        outputs: The sequences, by rising index.
        finished: Whether all sequences have ended.
        metrics: Times of the request's events.
        num_cached_tokens: Prompt tokens whose KV came from the prefix cache.
        pooled: The output of a finished pooling request: float32 in little-endian order. `PoolingRequestOutput`
            converts it.
        pooled_each_token: Whether `pooled` has one vector per token of the prompt.
        lora_request: The LoRA adapter of the request, if it had one.
        kv_transfer_params: Of a finished request whose KV blocks another engine may fetch: what the request to that
            engine has to contain, as `SamplingParams.extra_args["kv_transfer_params"]`.
        relaxations: Keywords of the request's JSON schema that are not enforced while the output is generated.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: Sequence[PositionLogprobMap | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    pooled: bytes | None = None
    pooled_each_token: bool = False
    lora_request: LoRARequest | None = None
    kv_transfer_params: dict[str, Any] | None = None
    relaxations: tuple[str, ...] = ()


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence of a beam search's result.

    Attributes:
        tokens: The prompt's token ids, then the generated ones.
        num_prompt_tokens: How many of `tokens` belong to the prompt.
        text: The generated text; empty if there is no tokenizer.
        cum_logprob: The sum of the log-probabilities of the generated tokens.
        score: The ranking score: that sum, divided by the number of generated tokens to the power of
            `length_penalty`.
        logprobs, finish_reason, stop_reason, error: As in CompletionOutput.
    """

    tokens: list[int]
    num_prompt_tokens: int
    text: str
    cum_logprob: float
    score: float
    logprobs: Positions | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The result of a beam search for one prompt.

    Attributes:
        sequences: Best first.
    """

    sequences: list[BeamSearchSequence]


Failure = tuple[str, str | None]
"""The message of a failed request, and the parameter that caused it if one did."""


def failure_of(output: RequestOutput) -> Failure | None:
    """Why a finished request has failed; None if no sequence of it has."""
    failed = next((each for each in output.outputs if each.finish_reason == "error"), None)
    return None if failed is None else (failed.error or "The request failed.", failed.error_parameter)

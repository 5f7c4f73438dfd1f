"""What the front end tells the engine core about a request, and what it hears back."""

from __future__ import annotations

import enum

import msgspec

from mvllm.messages.core_protocol import UtilityResult
from mvllm.messages.lora import LoRARequest
from mvllm.messages.pooling_params import PoolingParams
from mvllm.messages.sampling_params import SamplingParams

NOTHING_TO_SAMPLE = (
    "no token can be sampled for this request: the logits of all tokens are minus infinity or masked out"
)
"""Why a request ends whose settings leave nothing to choose from; or whose model gave no logits to choose by."""


class FinishReason(enum.IntEnum):
    """Why a request ended. The text form is what API users see."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


class EngineCoreRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One sequence to be generated, or one prompt to be made a vector of; validated and tokenized.

    Attributes:
        request_id: Unique among the requests that the engine core currently knows.
        prompt_token_ids: Token ids of the prompt, at least one.
        sampling_params: Always with n == 1; the front end splits a request for n sequences into n of these.
        eos_token_ids: Tokens that end the sequence unless `ignore_eos` is set.
        arrival_time: Seconds of the front end's monotonic clock.
        priority: Lower is served earlier (priority policy only).
        cache_salt: Only requests with the same salt share cached blocks.
        position_key: What a token's key depends on beside the tokens before it and its position (some rotary scalings
            look at the length of the prompt). Only requests with the same value share cached blocks.
        sibling_group: Id shared by the n sequences of one prompt, which share the prompt's KV blocks even where prefix
            caching is off. None for a request on its own.
        pooling_params: Set where the prompt's vector is wanted and nothing is generated; every field is chosen. The
            sampling parameters say nothing then.
        lora_request: The adapter that computes with the model; None for the model alone.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: list[int] = []
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    position_key: int = 0
    sibling_group: str | None = None
    pooling_params: PoolingParams | None = None
    lora_request: LoRARequest | None = None


class PositionLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities of one position: the token that stands there first, then the most probable ones.

    Attributes:
        token_ids: The token at the position, then the top-k in falling order (which may hold that token again).
        logprobs: Natural logarithms, parallel to `token_ids`.
        rank: Rank of the token at the position among the whole vocabulary, 1 = most probable.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True):
    """What happened to one request since the last output about it.

    Attributes:
        request_id: As in the request.
        new_token_ids: Tokens sampled since the last output (several, where outputs are not wanted each step).
        finish_reason: Set on the last output of a request.
        stop_reason: The stop token id that ended it, if one did (None for end-of-sequence tokens).
        logprobs: One entry per new token, where asked for.
        prompt_logprobs: Once per request, where asked for: one entry per prompt token but the first.
        num_cached_tokens: Prompt tokens whose KV came from the prefix cache when the request was first scheduled.
        error: What went wrong, when finish_reason is ERROR.
        scheduled_time: Monotonic time at which the request was first scheduled.
        first_token_time: Monotonic time at which its first token was known; 0 where it is in this output, alone.
        error_parameter: The setting of the request that the error is about, where it is the request's fault.
        pooling_output: The prompt's vector, float32 in little-endian order, where that was wanted.
    """

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    logprobs: list[PositionLogprobs] | None = None
    prompt_logprobs: list[PositionLogprobs] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    scheduled_time: float = 0.0
    first_token_time: float = 0.0
    error_parameter: str | None = None
    pooling_output: bytes | None = None


class SchedulerStats(msgspec.Struct, omit_defaults=True):
    """The scheduler's state after a step; all counters since start.

    Attributes:
        num_drafts: Guesses checked, each of one or several tokens.
        num_draft_tokens: Their tokens.
        accepted_at: By place in its guess, how many tokens were right, with all before them.
        num_prompt_tokens: Of the prompts of all sequences that were scheduled, cached ones included.
        num_generated_tokens: Of all sequences, whether or not anybody has been told of them yet.
        num_waiting_tokens: Of prompts, as of now, that are still to be computed or found in the cache.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_at: list[int] = []
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_waiting_tokens: int = 0

    @property
    def num_accepted_tokens(self) -> int:
        """Tokens that were guessed right."""
        return sum(self.accepted_at)


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True):
    """The outputs of one engine step; from an engine core in another process, also the state of its command queue.

    Attributes:
        outputs: One entry per request that has new tokens or has ended.
        stats: The scheduler's state after the step.
        num_acknowledged: Number of the last command that the core has received from this client.
        is_busy: Whether the core has unfinished requests of this client.
        utility_results: Results of utility calls.
    """

    outputs: list[EngineCoreOutput] = []
    stats: SchedulerStats | None = None
    num_acknowledged: int = 0
    is_busy: bool = False
    utility_results: list[UtilityResult] = []

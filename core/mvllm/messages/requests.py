"""EngineCoreRequest and EngineCoreOutputs: what goes into the engine core and what comes out of it."""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from mvllm.messages.core_protocol import CallResult
from mvllm.messages.kv_events import CacheChanges
from mvllm.messages.lora import LoRARequest
from mvllm.messages.multimodal import MultiModalItem
from mvllm.messages.pooling_params import PoolingParams
from mvllm.messages.sampling_params import SamplingParams

NOTHING_TO_SAMPLE = (
    "no token can be sampled for this request: the logits of all tokens are minus infinity or masked out"
)
"""The error of a request whose parameters exclude every token, or whose logits are all minus infinity."""


class FinishReason(enum.IntEnum):
    """Why a sequence ended. `str` gives the text that API users see."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


class RequestPair(msgspec.Struct, omit_defaults=True):
    """The companion of a request: a second prompt, with the same output tokens, whose logits are combined with those of
    the request before a token is sampled.

    Attributes:
        combiner: Name of the LogitsCombiner, an entry point of the group `mvllm.logits_combiners`.
        prompt_token_ids: The companion's prompt, at least one token.
        settings: What the combiner reads; only its package knows the format.
        parameter, prompt_parameter: The parameters that ask for the pair and for the companion's prompt, for errors.
        position_key: As in EngineCoreRequest, of the companion's prompt.
    """

    combiner: str
    prompt_token_ids: list[int]
    settings: bytes = b""
    parameter: str = "extra_args"
    prompt_parameter: str = "extra_args"
    position_key: int = 0


class EngineCoreRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One sequence to generate, or one prompt to embed or classify. Validated and tokenized.

    Attributes:
        request_id: Unique among the unfinished requests of the engine core.
        prompt_token_ids: Token ids of the prompt, at least one.
        sampling_params: With n == 1: the front end splits a request for n sequences into n requests.
        eos_token_ids: Tokens that end the sequence unless `ignore_eos` is set.
        arrival_time: Seconds of the front end's monotonic clock.
        priority: Lower is served earlier (priority policy only).
        cache_salt: Only requests with the same salt share cached blocks.
        position_key: A value that the KV of a token depends on, beside its prefix and position (some RoPE scalings
            depend on the length of the prompt). Only requests with the same value share cached blocks.
        sibling_group: Id shared by the n sequences of one prompt, which share the prompt's KV blocks even if prefix
            caching is off. None for a single sequence.
        pooling_params: Set for a pooling request, with every field chosen; the sampling parameters then have no effect.
        lora_request: The LoRA adapter; None for the base model.
        pair: The companion with which the request is scheduled and sampled; None for most requests.
        kv_transfer_params: What the client tells KV connectors; see `kv_transfer.connector.KVRequest`.
        items: Images, audio and embeddings of the prompt, by rising offset; their spans do not overlap.
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
    pair: RequestPair | None = None
    kv_transfer_params: dict[str, Any] | None = None
    items: list[MultiModalItem] = []


class PositionLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities at one position: of the token at the position, then of the most probable tokens.

    Attributes:
        token_ids: The token at the position, then the top-k by falling probability (which may contain it again).
        logprobs: Natural logarithms, parallel to `token_ids`.
        rank: Rank of the token at the position among the whole vocabulary, 1 = most probable.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True):
    """The new tokens and the end of one request, since its last output.

    Attributes:
        request_id: As in the request.
        new_token_ids: Tokens sampled since the last output (several, if the request does not need an output per step).
        finish_reason: Set on the last output of a request.
        stop_reason: The stop token id that ended it, if one did (None for end-of-sequence tokens).
        logprobs: One entry per new token, if requested.
        prompt_logprobs: Once per request, if requested: one entry per prompt token except the first.
        num_cached_tokens: Prompt tokens found in the prefix cache when the request was first scheduled.
        error: The error message, if finish_reason is ERROR.
        scheduled_time: Monotonic time at which the request was first scheduled.
        first_token_time: Monotonic time of its first token; 0 if this output contains only that token.
        error_parameter: The request parameter that caused the error, if one did.
        pooling_output: The pooled vector of a pooling request: float32 in little-endian order.
        weight_versions: In the only output of a request, if the weights changed while it ran: (version, number of
            tokens) of each earlier version. The other tokens have the version of the EngineCoreOutputs.
        conditional_logprobs: Of a request with a companion and `logprobs`: the log-probability of each new token in the
            request's own logits.
        kv_transfer_params: On the last output: what a KV connector tells the client, so that another engine finds the
            blocks of this request.
        relaxations: On the first output of a request with a JSON schema: keywords that its grammar does not enforce.
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
    weight_versions: list[tuple[int, int]] | None = None
    conditional_logprobs: list[float] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    relaxations: tuple[str, ...] = ()


class KVTierStats(msgspec.Struct, omit_defaults=True):
    """One place outside of the device where blocks are kept: host memory, or the store of a connector.

    Attributes:
        bytes_used, bytes_limit: Bytes of its contents, and the most that it keeps; 0 where the connector does not say.
        num_loaded: Blocks and states found in it and loaded: from host memory by steps, from a store by its connector.
        num_saved: Blocks and states saved to it.
        num_load_failures: Loads that failed; their tokens are computed.
    """

    bytes_used: int = 0
    bytes_limit: int = 0
    num_loaded: int = 0
    num_saved: int = 0
    num_load_failures: int = 0


ENCODER_SECONDS_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of the times of a step's encoder runs, in seconds."""


class SchedulerStats(msgspec.Struct, omit_defaults=True):
    """The scheduler's state after a step. Counters count since the start.

    Attributes:
        kv_cache_usage: Fraction of the KV cache blocks in use, 0 to 1.
        num_drafts: Verified drafts, of one or several tokens each.
        num_draft_tokens: Their tokens.
        accepted_at: By position in the draft, the number of accepted tokens.
        drafted_at: By position in the draft, the number of verified tokens.
        num_prompt_tokens: Prompt tokens of all scheduled sequences, cached ones included.
        num_generated_tokens: Generated tokens of all sequences, sent to the front end or not.
        num_waiting_tokens: Prompt tokens of unfinished requests that are neither computed nor found in the cache yet.
        num_swapped: Those of `num_waiting` that were preempted and have their keys and values in host memory.
        num_waiting_for_kv: Those of `num_waiting` that wait until a KV connector has loaded their prefix.
        kv_tiers: Where blocks are kept outside of the device, by name: `host`, and the connectors.
        encoder_cache_queries: Images, audio and embeddings whose results requests began to read.
        encoder_cache_hits: Those of them whose results were in the encoder cache.
        encoder_cache_rows: Rows of the results in the encoder cache.
        encoder_steps: Steps that ran encoders, by time: for each of ENCODER_SECONDS_BUCKETS the steps up to that time
            and above the one before, then those above all; empty before the first.
        encoder_seconds: Time of all of them; see `ModelRunnerOutput.encoder_seconds`.
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
    num_swapped: int = 0
    num_waiting_for_kv: int = 0
    kv_tiers: dict[str, KVTierStats] = {}
    encoder_cache_queries: int = 0
    encoder_cache_hits: int = 0
    encoder_cache_rows: int = 0
    encoder_steps: list[int] = []
    encoder_seconds: float = 0.0
    drafted_at: list[int] = []

    @property
    def num_accepted_tokens(self) -> int:
        """Accepted draft tokens."""
        return sum(self.accepted_at)


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True):
    """The outputs of one engine step; from an engine core in another process, also the state of its command queue.

    Attributes:
        outputs: One entry per request that has new tokens or has ended.
        stats: The scheduler's state after the step.
        num_acknowledged: Number of the last command that the core has received from this client.
        is_busy: Whether the core has unfinished requests of this client.
        call_results: Answers to commands.
        weight_version: Version of the weights that sampled the tokens; 0 for those of the start.
        cache_changes: How the prefix cache has changed since the last update; None if it has not, or nobody asks.
    """

    outputs: list[EngineCoreOutput] = []
    stats: SchedulerStats | None = None
    num_acknowledged: int = 0
    is_busy: bool = False
    call_results: list[CallResult] = []
    weight_version: int = 0
    cache_changes: CacheChanges | None = None

"""The state of one request in the scheduler.

    add ──> WAITING ──schedule──> RUNNING ──stop, length, error, abort──> FINISHED
               ^                   │  ^
               │     preempt, last token known
               ├───────────────────┤  │
               │     preempt, last token in flight
    token ─── WAITING_FOR_TOKEN <──┘

A request with `structured_outputs` starts as WAITING_FOR_GRAMMAR, until its grammar is compiled. A waiting request
whose prefix is in the store of a KV connector is WAITING_FOR_KV until it has been loaded to host memory. SWAPPED is
WAITING after a preemption that keeps the keys and values in host memory. An abort or an error ends a request in any
state.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence
from typing import Protocol

from mvllm.kv_cache.block_table import BlockTable
from mvllm.messages.requests import EngineCoreRequest, FinishReason, PositionLogprobs
from mvllm.messages.sampling_params import RequestOutputKind, SamplingParams

PAIRED = sys.maxsize
"""`Request.plain_from` of request pairs."""


class RequestStatus(enum.Enum):
    """States of a request. The scheduler does not plan requests in the blocked states, `WAITING_FOR_...`."""

    WAITING = enum.auto()
    WAITING_FOR_TOKEN = enum.auto()
    WAITING_FOR_GRAMMAR = enum.auto()
    WAITING_FOR_KV = enum.auto()
    SWAPPED = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Grammar(Protocol):
    """Which tokens may come next in one sequence, given its tokens so far."""

    @property
    def is_ready(self) -> bool:
        """Whether `mask` is the mask of the next token; otherwise it is being computed."""

    @property
    def mask(self) -> bytes:
        """One row of `SchedulerOutput.token_masks`."""

    @property
    def is_complete(self) -> bool:
        """Whether the last token has ended the sequence."""

    @property
    def error(self) -> str | None:
        """Why the sequence has failed, if it has."""

    @property
    def expected_seconds(self) -> float:
        """Estimated time of the next mask; 0 where plans must not depend on time."""

    @property
    def relaxations(self) -> tuple[str, ...]:
        """What of a JSON schema it does not enforce."""

    def accept(self, token: int, *, blocking: bool = False) -> None:
        """Advances by one token. The mask, or an error, may come later; with `blocking`, before the next plan."""

    def draft_masks(self, tokens: Sequence[int]) -> list[bytes]:
        """Masks behind each of the leading draft tokens that can be verified; changes nothing else that is visible."""


class Request:
    """A sequence being generated, or a pooling request, which finishes where its first token would be sampled.

        token_ids             | prompt ............... | generated ..... |          known here
        num_tokens            |------------------------------------------------>|   and in flight: sampled by a plan
                                                                                    whose results are not back yet
        num_computed_tokens   |---------------------------------->|                 KV written by the plans made so far

    Draft tokens in flight count in neither until the results say how many were accepted. So `num_tokens` and
    `num_computed_tokens` are lower bounds; they are larger by at most `num_drafts_in_flight`.

    Args:
        data: The request as received.
        table: Its block table, which shares `token_ids`.
        order: Sort key in the queue, lowest first.
        max_model_len: Longest sequence in tokens.

    Attributes:
        max_num_tokens: Length, prompt and output together, at which the request ends.
        pooling_type: How hidden states are pooled; None for requests that generate.
        stop_ids: Tokens that end the request once `min_tokens` are generated.
        row: Its row while it runs, otherwise -1.
        lora_int_id: Its LoRA adapter, or 0.
        emits_each_step: Each token is sent at once; otherwise all tokens are sent when the request ends.
        has_only_tokens: Tokens are sent at once, without log-probabilities: the common case, which has a fast path.
        logprobs: Of tokens not sent yet, if requested.
        prompt_logprobs: Of prompt tokens 1, 2, ... so far, if requested; None again once sent.
        num_cached_tokens: Tokens found in the prefix cache when first scheduled; -1 before.
        scheduled_time: When first scheduled.
        first_token_time: Time of the first token, for requests that do not send each token at once; 0 before.
        is_long: The long-prefill limit has delayed it while it waited. Checked again when the limit permits another
            long prompt: by then more of this prompt may be in the prefix cache.
        is_very_long: Its prompt gets only as many tokens in a step as `long_prefill_slowdown` permits.
        takes_drafts: Workers may propose draft tokens for it. Not where logits processors act on it, which read every
            token before the next one is sampled; of those of the engine the results of its first token tell.
        draft_token_ids: Draft tokens for its next plan.
        num_drafts_in_flight: Draft tokens, or placeholders of them, in plans whose results are not back.
        grammar: Its grammar, if it has one.
        relaxations: What that does not enforce, until an output says so.
        weight_versions: Versions of the weights that sampled its tokens before the present one, with the number of
            tokens of each.
        companion: The other side of a request pair, see `request_pairs.py`.
        primary: Of a companion: the request that is listed.
        conditional_logprobs: Of tokens not sent yet, for requests with a companion and `logprobs`.
        items: Images, audio and embeddings of its prompt.
        items_end: First position behind the last of them; 0 without any.
        plain_from: From this position on it needs neither items nor a companion to be planned.
        is_swapped: Its keys and values are kept in host memory until it runs again.
    """

    __slots__ = (
        "companion",
        "conditional_logprobs",
        "data",
        "draft_token_ids",
        "emits_each_step",
        "first_token_time",
        "grammar",
        "has_only_tokens",
        "is_long",
        "is_swapped",
        "is_very_long",
        "items",
        "items_end",
        "logprobs",
        "lora_int_id",
        "max_num_tokens",
        "min_num_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_drafts_in_flight",
        "num_prompt_tokens",
        "num_tokens",
        "order",
        "plain_from",
        "pooling_type",
        "primary",
        "prompt_logprobs",
        "relaxations",
        "request_id",
        "row",
        "scheduled_time",
        "status",
        "stop_ids",
        "table",
        "takes_drafts",
        "token_ids",
        "weight_versions",
    )

    def __init__(self, data: EngineCoreRequest, table: BlockTable, order: tuple[int, int], max_model_len: int) -> None:
        params = data.sampling_params
        self.data = data
        self.request_id = data.request_id
        self.order = order
        self.status = RequestStatus.WAITING
        self.row = -1
        self.lora_int_id = 0 if data.lora_request is None else data.lora_request.lora_int_id

        self.table = table
        self.token_ids = table.token_ids
        self.num_prompt_tokens = self.num_tokens = len(self.token_ids)
        self.num_computed_tokens = 0

        self.items = data.items
        self.items_end = data.items[-1].span.stop if data.items else 0
        self.plain_from = self.items_end

        self.pooling_type = None if data.pooling_params is None else data.pooling_params.pooling_type
        if data.pooling_params is not None:
            self.max_num_tokens = self.num_prompt_tokens + 1
        else:
            max_tokens = max_model_len if params.max_tokens is None else params.max_tokens
            # With max_tokens=0 a token is sampled behind the prompt, and left out of the output.
            self.max_num_tokens = min(self.num_prompt_tokens + max(max_tokens, 1), max_model_len)
        self.min_num_tokens = self.num_prompt_tokens + params.min_tokens
        eos_token_ids = () if params.ignore_eos else data.eos_token_ids
        self.stop_ids = frozenset([*eos_token_ids, *(params.stop_token_ids or ())])

        # The front end looks for stop strings, and needs each token for that.
        self.emits_each_step = params.output_kind != RequestOutputKind.FINAL_ONLY or bool(params.stop)
        self.logprobs: list[PositionLogprobs] | None = None if params.logprobs is None else []
        self.prompt_logprobs: list[PositionLogprobs] | None = None if params.prompt_logprobs is None else []
        self.has_only_tokens = self.emits_each_step and self.logprobs is None and self.prompt_logprobs is None
        self.num_cached_tokens = -1
        self.scheduled_time = 0.0
        self.first_token_time = 0.0
        self.takes_drafts = not params.logits_processors
        self.draft_token_ids: list[int] = []
        self.num_drafts_in_flight = 0
        self.grammar: Grammar | None = None
        self.relaxations: tuple[str, ...] = ()
        self.is_long = False
        self.is_very_long = False
        self.is_swapped = False
        self.weight_versions: list[tuple[int, int]] = []
        self.companion: Request | None = None
        self.primary: Request | None = None
        self.conditional_logprobs: list[float] = []

    def __lt__(self, other: Request) -> bool:
        return self.order < other.order

    @property
    def sides(self) -> tuple[Request, ...]:
        """The request and its companion, if it has one. Each side has a row and blocks."""
        return (self,) if self.companion is None else (self, self.companion)

    @property
    def listed(self) -> Request:
        """The request that lists and outputs know: of a companion its primary."""
        return self.primary or self

    @property
    def has_token_in_flight(self) -> bool:
        """Whether a plan samples for this request whose result is not back."""
        return self.num_tokens > len(self.token_ids)

    @property
    def max_num_tokens_in_flight(self) -> int:
        """`num_tokens` if every draft token in flight is accepted."""
        return self.num_tokens + self.num_drafts_in_flight

    @property
    def awaits_mask(self) -> bool:
        """Whether its grammar is still computing the next mask."""
        return self.grammar is not None and not self.grammar.is_ready

    @property
    def has_all_prompt_logprobs(self) -> bool:
        """Whether all requested prompt log-probabilities are there."""
        return self.prompt_logprobs is None or len(self.prompt_logprobs) >= self.num_prompt_tokens - 1

    @property
    def needs_every_position(self) -> bool:
        """Whether positions found in the prefix cache would be missing from the result."""
        if self.pooling_type is not None:
            return self.pooling_type.needs_every_position
        return not self.has_all_prompt_logprobs or bool(self.data.sampling_params.skip_reading_prefix_cache)

    def add_prompt_logprobs(self, start: int, entries: list[PositionLogprobs]) -> None:
        """Adds the log-probabilities that a step over prompt positions from `start` on computed.

        A preempted request computes positions again; known entries are kept.
        """
        held = self.prompt_logprobs
        if held is not None:
            assert start <= len(held)
            held.extend(entries[len(held) - start :])

    def close_weight_version(self, version: int) -> None:
        """Records that the tokens since the last call were sampled with this version of the weights."""
        count = len(self.token_ids) - self.num_prompt_tokens - sum(count for _, count in self.weight_versions)
        if count:
            self.weight_versions.append((version, count))

    def check_stop(self, token: int) -> tuple[FinishReason, int | None] | None:
        """Whether the newest token, `token`, ends the request: the reason, and the stop token if it was one.

        An end-of-sequence token is not a stop token, even if both lists contain it.
        """
        num_tokens = len(self.token_ids)
        if token in self.stop_ids and num_tokens >= self.min_num_tokens:
            is_eos = not self.data.sampling_params.ignore_eos and token in self.data.eos_token_ids
            return FinishReason.STOP, None if is_eos else token
        if num_tokens >= self.max_num_tokens:
            return FinishReason.LENGTH, None
        return None

    def append_accepted(
        self, tokens: list[int], stop: tuple[FinishReason, int | None] | None
    ) -> tuple[list[int], tuple[FinishReason, int | None] | None]:
        """Appends draft tokens that were accepted behind the token sampled in a step.

        Args:
            tokens: Their log-probabilities are stored already; those of tokens behind the end are removed.
            stop: How the request has ended with the token before them, if it has.

        Returns:
            The tokens that belong to the request, and how it ends, if it does.
        """
        appended: list[int] = []
        for token in tokens:
            if stop is not None:
                break
            self.token_ids.append(token)
            appended.append(token)
            stop = self.advance(token)
        if self.logprobs is not None and len(appended) < len(tokens):
            del self.logprobs[len(appended) - len(tokens) :]
        self.num_tokens += len(appended)
        if self.status is RequestStatus.RUNNING:
            self.num_computed_tokens += len(appended)
        return appended, stop

    def advance(self, token: int) -> tuple[FinishReason, int | None] | None:
        """Advances the grammar, if there is one, by the newest token, `token`, unless that is an end token.

        Returns:
            How the request ends, if it does: what `check_stop` returns, or because the grammar is complete.
        """
        stop, grammar = self.check_stop(token), self.grammar
        if grammar is None or (stop is not None and stop[0] is FinishReason.STOP):
            return stop
        grammar.accept(token, blocking=self.has_token_in_flight)  # a step waits for it
        return (FinishReason.STOP, None) if grammar.is_complete else stop


RESTARTED = Request(
    EngineCoreRequest(request_id="", prompt_token_ids=[0], sampling_params=SamplingParams()),
    BlockTable([0], None, 0),
    order=(0, 0),
    max_model_len=1,
)
"""Replaces a restarted request in batches in flight, whose results for it are dropped.

It is finished and holds nothing.
"""
RESTARTED.status = RequestStatus.FINISHED

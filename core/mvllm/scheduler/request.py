"""A request as the scheduler sees it.

    add ──> WAITING ──schedule──> RUNNING ──stop, length, error, abort──> FINISHED
               ^                   │  ^
               │     preempt, last token known
               ├───────────────────┤  │
               │     preempt, last token in flight
    token ─── WAITING_FOR_TOKEN <──┘

A request whose text must have a form begins as WAITING_FOR_GRAMMAR, until that has been compiled.

(An abort or an error ends a request from every state.)
"""

from __future__ import annotations

import enum
from typing import Protocol

from mvllm.kv_cache.block_table import BlockTable
from mvllm.messages.requests import EngineCoreRequest, FinishReason, PositionLogprobs
from mvllm.messages.sampling_params import RequestOutputKind, SamplingParams


class RequestStatus(enum.Enum):
    """Where a request stands. `WAITING_FOR_...` are blocked: `schedule` passes them over until something happens."""

    WAITING = enum.auto()
    WAITING_FOR_TOKEN = enum.auto()
    WAITING_FOR_GRAMMAR = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Grammar(Protocol):
    """Which tokens may come next in one sequence. It knows the tokens generated so far."""

    @property
    def is_ready(self) -> bool:
        """Whether `mask` is that of the next token; otherwise it is being computed."""

    @property
    def mask(self) -> bytes:
        """As in `SchedulerOutput.token_masks`, of one row."""

    @property
    def is_complete(self) -> bool:
        """Whether the last token has ended the sequence."""

    @property
    def error(self) -> str | None:
        """Why it cannot go on, if it cannot."""

    @property
    def expected_seconds(self) -> float:
        """Time that the next mask will take, about; 0 where plans may not depend on time."""

    def accept(self, token: int, *, blocking: bool = False) -> None:
        """Goes on to the next position. Its mask, or an error, may come later, but not with `blocking`."""


class Request:
    """One sequence being generated; or a prompt being made a vector of, which then stands where the first token would.

        token_ids             | prompt ............... | generated ..... |          known here
        num_tokens            |------------------------------------------------>|   and in flight: sampled by a plan
                                                                                    whose results are not back yet
        num_computed_tokens   |---------------------------------->|                 KV written by the plans made so far

    Args:
        data: The request as it came.
        table: Its block table, which shares `token_ids`.
        order: Place in the queue, lowest first.
        max_model_len: Longest sequence in tokens.

    Attributes:
        max_num_tokens: Prompt and output together end at this length.
        pooling_type: Which hidden states make the prompt's vector, where that is wanted.
        stop_ids: Tokens that end the request once `min_tokens` are generated.
        row: Its row while it runs, else -1.
        lora_int_id: Its adapter's, or 0.
        emits_each_step: Each token is sent out at once; otherwise all are, when the request ends.
        is_plain: Sent out at once, and nothing but tokens. The usual case, for which the scheduler has a short way.
        logprobs: Of tokens not sent out yet, if asked for.
        prompt_logprobs: Of prompt tokens 1, 2, ... so far, if asked for; None again once they were sent out.
        num_cached_tokens: Found in the prefix cache when first scheduled; -1 before.
        scheduled_time: When first scheduled.
        first_token_time: When the first token was known, of requests that do not send tokens out at once; 0 before.
        is_long: Has waited while as many long prompts as may be were computed. Found out again when there is room: more
            of it may be in the prefix cache by then.
        draft_token_ids: Guesses at the tokens behind the last known one, for its next plan.
        grammar: Says which tokens may come next, where not all may.
    """

    __slots__ = (
        "data",
        "draft_token_ids",
        "emits_each_step",
        "first_token_time",
        "grammar",
        "has_only_tokens",
        "is_long",
        "logprobs",
        "lora_int_id",
        "max_num_tokens",
        "min_num_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_tokens",
        "order",
        "pooling_type",
        "prompt_logprobs",
        "request_id",
        "row",
        "scheduled_time",
        "status",
        "stop_ids",
        "table",
        "token_ids",
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

        self.pooling_type = None if data.pooling_params is None else data.pooling_params.pooling_type
        if data.pooling_params is not None:
            self.max_num_tokens = self.num_prompt_tokens + 1
        else:
            max_tokens = max_model_len if params.max_tokens is None else params.max_tokens
            self.max_num_tokens = min(self.num_prompt_tokens + max_tokens, max_model_len)
        self.min_num_tokens = self.num_prompt_tokens + params.min_tokens
        eos_token_ids = () if params.ignore_eos else data.eos_token_ids
        self.stop_ids = frozenset([*eos_token_ids, *(params.stop_token_ids or ())])

        # Stop strings are found by the front end, which must see the text to find them.
        self.emits_each_step = params.output_kind != RequestOutputKind.FINAL_ONLY or bool(params.stop)
        self.logprobs: list[PositionLogprobs] | None = None if params.logprobs is None else []
        self.prompt_logprobs: list[PositionLogprobs] | None = None if params.prompt_logprobs is None else []
        self.has_only_tokens = self.emits_each_step and self.logprobs is None and self.prompt_logprobs is None
        self.num_cached_tokens = -1
        self.scheduled_time = 0.0
        self.first_token_time = 0.0
        self.draft_token_ids: list[int] = []
        self.grammar: Grammar | None = None
        self.is_long = False

    def __lt__(self, other: Request) -> bool:
        return self.order < other.order

    @property
    def has_token_in_flight(self) -> bool:
        """Whether a plan was made that samples for this request and whose result is not back."""
        return self.num_tokens > len(self.token_ids)

    @property
    def awaits_mask(self) -> bool:
        """Whether it cannot be planned before its grammar says which tokens may come next."""
        return self.grammar is not None and not self.grammar.is_ready

    @property
    def has_all_prompt_logprobs(self) -> bool:
        """Whether no log-probabilities of prompt tokens are wanted that are not there."""
        return self.prompt_logprobs is None or len(self.prompt_logprobs) >= self.num_prompt_tokens - 1

    @property
    def needs_every_position(self) -> bool:
        """Whether something is wanted of positions that, found in the prefix cache, would not be computed."""
        if self.pooling_type is not None:
            return self.pooling_type.needs_every_position
        return not self.has_all_prompt_logprobs

    def add_prompt_logprobs(self, start: int, entries: list[PositionLogprobs]) -> None:
        """Takes what a step over prompt positions from `start` on gave.

        A request that was preempted computes positions again; what it has already is kept.
        """
        held = self.prompt_logprobs
        if held is not None:
            assert start <= len(held)
            held.extend(entries[len(held) - start :])

    def check_stop(self, token: int) -> tuple[FinishReason, int | None] | None:
        """Whether the request ends with `token`, its newest: the reason, and the stop token if it was one.

        An end-of-sequence token is not a stop token, even where both lists name it.
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
        """Takes tokens that were sampled in one step behind the one that its plan had counted.

        Args:
            tokens: Their log-probabilities have been put aside; those of tokens behind the end are dropped.
            stop: How the request has ended with the token before them, if it has.

        Returns:
            Those that belong to the request, and how it ends, if it does.
        """
        taken: list[int] = []
        for token in tokens:
            if stop is not None:
                break
            self.token_ids.append(token)
            taken.append(token)
            stop = self.check_stop(token)
        if self.logprobs is not None and len(taken) < len(tokens):
            del self.logprobs[len(taken) - len(tokens) :]
        self.num_tokens += len(taken)
        if self.status is RequestStatus.RUNNING:
            self.num_computed_tokens += len(taken)
        return taken, stop

    def advance_grammar(
        self, token: int, stop: tuple[FinishReason, int | None] | None
    ) -> tuple[FinishReason, int | None] | None:
        """Tells the grammar of `token`, its newest, unless that stands outside of it.

        Args:
            stop: What `check_stop` says.

        Returns:
            How the request ends, if it does: `stop`, or because the text is complete and nothing can follow.
        """
        grammar = self.grammar
        assert grammar is not None
        if stop is not None and stop[0] is FinishReason.STOP:
            return stop
        grammar.accept(token, blocking=self.has_token_in_flight)  # a step waits for it
        return (FinishReason.STOP, None) if grammar.is_complete else stop


RESTARTED = Request(
    EngineCoreRequest(request_id="", prompt_token_ids=[0], sampling_params=SamplingParams()),
    BlockTable([0], None, 0),
    order=(0, 0),
    max_model_len=1,
)
"""In a batch under way, in the place of a request whose results are not to be used. It has ended, and holds nothing."""
RESTARTED.status = RequestStatus.FINISHED

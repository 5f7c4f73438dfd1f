"""All unfinished requests of a scheduler: the list that each is in, its row and its KV blocks.

    waiting    status WAITING or SWAPPED         a queue in service order
    blocked    status WAITING_FOR_...            waits for a grammar, for the result of a step, or for a KV connector
    running    status RUNNING                    has a row, in service order

A method here is one transition between these lists; it moves row and blocks along.
"""

from __future__ import annotations

import heapq
from bisect import insort
from typing import Protocol

from mvllm.kv_cache.kv_cache_manager import KVCacheManager
from mvllm.messages.requests import EngineCoreOutput, FinishReason
from mvllm.scheduler.encoder_planner import EncoderPlanner
from mvllm.scheduler.request import Grammar, Request, RequestStatus
from mvllm.scheduler.request_outputs import final_output
from mvllm.scheduler.request_queue import RequestQueue

_BLOCKED_STATUSES = (
    RequestStatus.WAITING_FOR_TOKEN,
    RequestStatus.WAITING_FOR_GRAMMAR,
    RequestStatus.WAITING_FOR_KV,
)


class RowAllocator:
    """Allocates rows 0 .. num_rows - 1, the lowest free one first.

    A freed row can be allocated again in the same plan: workers apply `SchedulerOutput.freed_rows` first.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free = list(range(num_rows))
        self._freed: list[int] = []

    @property
    def num_free(self) -> int:
        """Rows that can be allocated."""
        return len(self._free)

    @property
    def num_allocated(self) -> int:
        """Rows in use."""
        return self.num_rows - len(self._free)

    def allocate(self) -> int:
        """Allocates a row; there must be a free one."""
        return heapq.heappop(self._free)

    def free(self, row: int) -> None:
        """Frees a row."""
        heapq.heappush(self._free, row)
        self._freed.append(row)

    def pop_freed(self) -> list[int]:
        """The rows freed since the last call."""
        freed, self._freed = self._freed, []
        return freed

    def check_integrity(self, allocated: list[int]) -> None:
        """Raises AssertionError unless every row is either free or in `allocated`, once."""
        assert sorted([*self._free, *allocated]) == list(range(self.num_rows)), (
            f"free {self._free}, allocated {allocated}"
        )


class RequestListener(Protocol):
    """A listener of RequestLists."""

    def request_ended(self, request: Request) -> None:
        """The request ends. It still has its blocks."""


class RequestLists:
    """The requests that are not finished.

    Args:
        kv_cache: Allocates their blocks.
        num_rows: Most running requests.
        encoders: Keeps the results that requests with items read; None without encoders.

    Attributes:
        by_id: All of them.
        waiting, blocked, running: See the module.
        rows: Allocates rows to the running ones.
        pending_outputs: Final outputs of requests that ended outside of a step, for the next results.
        num_prompt_logprobs: How many return prompt log-probabilities.
        num_grammars: How many have a grammar.
        num_pairs: How many have a companion.
        num_with_items: How many have images, audio or embeddings.
        num_swapped: How many are swapped.
        listeners: Called when requests end.
    """

    def __init__(self, kv_cache: KVCacheManager, num_rows: int, encoders: EncoderPlanner | None = None) -> None:
        self._kv_cache = kv_cache
        self._encoders = encoders
        self.by_id: dict[str, Request] = {}
        self.waiting = RequestQueue()
        self.blocked: set[Request] = set()
        self.running: list[Request] = []
        self.rows = RowAllocator(num_rows)
        self.pending_outputs: list[EngineCoreOutput] = []
        self.num_prompt_logprobs = 0
        self.num_grammars = 0
        self.num_pairs = 0
        self.num_with_items = 0
        self.num_swapped = 0
        self.listeners: list[RequestListener] = []

    def add(self, request: Request) -> None:
        """Adds a new request. With `structured_outputs` it is blocked until `start_grammar`."""
        self.by_id[request.request_id] = request
        self.num_prompt_logprobs += request.prompt_logprobs is not None
        self.num_pairs += request.companion is not None
        self.num_with_items += bool(request.items)
        if request.data.sampling_params.structured_outputs is None:
            self.waiting.push(request)
        else:
            request.status = RequestStatus.WAITING_FOR_GRAMMAR
            self.blocked.add(request)

    def start_grammar(self, request: Request, grammar: Grammar) -> None:
        """Gives a request its grammar: blocked -> waiting."""
        assert request.status is RequestStatus.WAITING_FOR_GRAMMAR
        request.grammar = grammar
        if grammar.relaxations:
            request.relaxations, request.has_only_tokens = grammar.relaxations, False
        self.num_grammars += 1
        self._move_to_waiting(request)

    def run_next(self) -> Request:
        """Allocates a row, or two, to the next waiting request, which has its blocks: waiting -> running."""
        request = self.waiting.pop()
        self._set_swapped(request, False)
        for side in request.sides:
            side.status = RequestStatus.RUNNING
            side.row = self.rows.allocate()
        if self.running and request.order < self.running[-1].order:
            insort(self.running, request)
        else:
            self.running.append(request)
        return request

    def preempt_last(self, *, is_swapped: bool = False) -> Request:
        """Frees row and blocks of the last running request: running -> waiting, or blocked if a token is in flight.

        Args:
            is_swapped: Its keys and values are kept in host memory.
        """
        request = self.running.pop()
        self._set_swapped(request, is_swapped)
        waits = request.has_token_in_flight
        ready = RequestStatus.SWAPPED if is_swapped else RequestStatus.WAITING
        for side in request.sides:
            self._kv_cache.free(side.table, side.num_computed_tokens)
            self._reset_computed(side)
            side.status = RequestStatus.WAITING_FOR_TOKEN if waits else ready
        if waits:
            self.blocked.add(request)
        else:
            self.waiting.push(request)
        return request

    def restart(self, request: Request) -> None:
        """Recomputes all tokens of a request whose blocks were freed and whose tokens in flight are dropped."""
        for side in request.sides:
            side.num_tokens = len(side.token_ids)
            side.draft_token_ids = []
            side.num_drafts_in_flight = 0
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            for side in request.sides:
                self._kv_cache.free(side.table, side.num_computed_tokens)  # of the other side of a pair
                self._reset_computed(side)
                side.status = RequestStatus.WAITING
            self.waiting.push(request)
        else:
            self.unblock(request)

    def unblock(self, request: Request) -> None:
        """Moves a preempted request whose tokens are all known: blocked -> waiting."""
        request = request.listed
        if request.status is RequestStatus.WAITING_FOR_TOKEN:
            if not any(side.has_token_in_flight for side in request.sides):
                self._move_to_waiting(request)

    def wait_for_kv(self, request: Request) -> None:
        """Blocks a request until a connector has loaded its prefix: waiting -> blocked."""
        self.waiting.remove(request)
        for side in request.sides:
            side.status = RequestStatus.WAITING_FOR_KV
        self.blocked.add(request)

    def start_after_load(self, request: Request) -> None:
        """Unblocks a request that has waited for a connector: blocked -> waiting."""
        assert request.status is RequestStatus.WAITING_FOR_KV
        self._move_to_waiting(request)

    def drop_swapped(self, request: Request) -> None:
        """Releases the host blocks of a waiting request: it computes its tokens again."""
        for side in request.sides:
            self._kv_cache.release_host_blocks(side.table)
            if side.status is RequestStatus.SWAPPED:
                side.status = RequestStatus.WAITING
        self._set_swapped(request, False)

    def fail(self, request: Request, message: str, parameter: str | None = None) -> None:
        """Ends a request in any state with an error, which is added to `pending_outputs`."""
        output = final_output(request, FinishReason.ERROR, None, message)
        output.error_parameter = parameter
        self.pending_outputs.append(output)
        self.drop(request)

    def drop(self, request: Request) -> None:
        """Ends a request in any state without an output."""
        match request.status:
            case RequestStatus.RUNNING:
                self.running.remove(request)
            case RequestStatus.WAITING | RequestStatus.SWAPPED:
                self.waiting.remove(request)
            case _:
                self.blocked.remove(request)
        self._release(request)

    def finish(self, requests: list[Request]) -> None:
        """Ends requests whose final output exists."""
        for request in requests:
            if request.status is RequestStatus.RUNNING:
                self._release(request)
            else:
                self.drop(request)
        # All at once: removing them one by one is quadratic.
        self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]

    def num_waiting_tokens(self) -> int:
        """Tokens of waiting requests, and of the prompts that running ones have not computed yet."""
        count = self.waiting.num_tokens
        for request in reversed(self.running):  # unfinished prompts are at the end: they were admitted last
            left = request.num_prompt_tokens - request.num_computed_tokens
            if left <= 0:
                break
            count += left
        return count

    def _move_to_waiting(self, request: Request) -> None:
        self.blocked.remove(request)
        for side in request.sides:
            side.status = RequestStatus.SWAPPED if request.is_swapped else RequestStatus.WAITING
        self.waiting.push(request)

    def _set_swapped(self, request: Request, is_swapped: bool) -> None:
        self.num_swapped += is_swapped - request.is_swapped
        request.is_swapped = is_swapped

    def _reset_computed(self, request: Request) -> None:
        self._free_items(request)
        self.rows.free(request.row)
        request.row = -1
        request.num_computed_tokens = 0
        request.draft_token_ids = []

    def _free_items(self, request: Request) -> None:
        if request.items and self._encoders is not None:
            self._encoders.release(request)

    def _release(self, request: Request) -> None:
        """Frees rows and blocks of a request that has been removed from its list."""
        for listener in self.listeners:
            listener.request_ended(request)
        self._free_items(request)
        self._set_swapped(request, False)
        for side in request.sides:
            self._kv_cache.release_host_blocks(side.table)
            if side.row >= 0:
                self.rows.free(side.row)
                side.row = -1
            self._kv_cache.free(side.table, side.num_computed_tokens)
            side.status = RequestStatus.FINISHED
        self.num_prompt_logprobs -= request.data.sampling_params.prompt_logprobs is not None
        self.num_grammars -= request.grammar is not None
        self.num_pairs -= request.companion is not None
        self.num_with_items -= bool(request.items)
        request.grammar = None
        del self.by_id[request.request_id]

    def check_integrity(self) -> None:
        """Raises AssertionError unless every request is in the list of its status and holds what that allows."""
        self._kv_cache.check_integrity()
        running = [side for request in self.running for side in request.sides]
        self.rows.check_integrity([request.row for request in running])
        listed = [*self.running, *self.waiting, *self.blocked]
        assert len(listed) == len(set(listed)), "A request is listed twice"
        assert set(listed) == set(self.by_id.values()), "The lists and the requests known differ"
        assert self.running == sorted(self.running), "The running requests are out of order"
        for requests, statuses in (
            (self.running, (RequestStatus.RUNNING,)),
            (self.waiting, (RequestStatus.WAITING, RequestStatus.SWAPPED)),
            (self.blocked, _BLOCKED_STATUSES),
        ):
            for request in requests:
                assert request.status in statuses, f"{request.request_id} is listed as {statuses}, not {request.status}"
                for side in request.sides:
                    assert side.status is request.status, f"the sides of {request.request_id} differ"
                    _check_request(side)
        num_held = len({block for request in running for block in request.table.held_blocks})
        assert num_held == self._kv_cache.num_blocks - self._kv_cache.num_free_blocks, "Blocks leaked"
        self._check_counts()

    def _check_counts(self) -> None:
        requests = self.by_id.values()
        assert self.num_swapped == sum(request.is_swapped for request in requests)
        assert self.num_grammars == sum(request.grammar is not None for request in requests)
        assert self.num_with_items == sum(bool(request.items) for request in requests)
        assert self.num_pairs == sum(request.companion is not None for request in requests)


def _check_request(request: Request) -> None:
    name, known = request.request_id, len(request.token_ids)
    assert request.num_computed_tokens <= request.table.num_slots, f"{name} computed tokens without a slot"
    assert request.num_computed_tokens < request.num_tokens, f"{name} has nothing to compute"
    most = request.max_num_tokens_in_flight
    assert known <= request.num_tokens <= most <= request.max_num_tokens, f"{name}: {known} of {request.num_tokens}"
    assert request.has_token_in_flight or most == request.num_tokens, f"{name} has draft tokens of no step in flight"
    computed = request.num_computed_tokens + request.num_drafts_in_flight
    if request.status is RequestStatus.RUNNING:
        assert computed <= request.table.num_slots, f"{name} verifies draft tokens without a slot"
    if request.status is not RequestStatus.RUNNING:
        assert not request.table.block_ids and request.row < 0 and not request.num_computed_tokens, f"{name} holds"

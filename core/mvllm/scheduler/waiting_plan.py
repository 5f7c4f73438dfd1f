"""Admits waiting requests to a step, in service order, as far as the policies of admission allow.

Each look at a request ends in one of three ways: it starts, it is set aside until the next look, or nothing after it is
looked at. So every round looks at each waiting request once at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mvllm.kv_cache.kv_cache_manager import KVCacheManager
from mvllm.messages.requests import SchedulerStats
from mvllm.scheduler.admission.policy import AdmissionPolicy, Candidate, Decision
from mvllm.scheduler.block_allocator import BlockAllocator
from mvllm.scheduler.long_prefill_limiter import LongPrefillLimiter
from mvllm.scheduler.request import Request
from mvllm.scheduler.request_lists import RequestLists
from mvllm.scheduler.request_outputs import new_request_data
from mvllm.scheduler.step import Step

_MAX_PASSED_OVER = 256
"""Most waiting requests that one step passes over to look for others."""


class WaitingPlan:
    """Admits waiting requests. Used by the step planner.

    Args:
        requests: The requests of the scheduler.
        kv_cache: Finds cached prefixes.
        policies: Asked in this order, see `admission/policy.py`.
        blocks: Allocates blocks.
        limiter: Counts long prompts that wait.
        stats: Counters to add to.
        clock: Seconds, monotonic.
        can_chunk: Prompts can be computed over several steps.
    """

    def __init__(
        self,
        requests: RequestLists,
        kv_cache: KVCacheManager,
        policies: Sequence[AdmissionPolicy],
        *,
        blocks: BlockAllocator,
        limiter: LongPrefillLimiter,
        stats: SchedulerStats,
        clock: Callable[[], float],
        can_chunk: bool,
    ) -> None:
        self._requests = requests
        self._kv_cache = kv_cache
        self._policies = policies
        self._blocks = blocks
        self._limiter = limiter
        self._stats = stats
        self._clock = clock
        self._can_chunk = can_chunk

    def plan(self, step: Step) -> None:
        """Admits requests until one does not fit."""
        requests, waiting = self._requests, self._requests.waiting
        policies = [policy for policy in self._policies if policy.start_round(requests)]
        passed_over: list[Request] = []
        while waiting and step.budget and requests.rows.num_free:
            candidate = Candidate(waiting.peek(), step, self._kv_cache)
            decision = self._decide(candidate, policies)
            if decision is Decision.ADMIT:
                self._start(candidate)
            elif decision is Decision.PASS_OVER and len(passed_over) < _MAX_PASSED_OVER:
                passed_over.append(waiting.pop())
            elif candidate.lacks_blocks and not requests.running:
                self._blocks.fail_cache_too_small(candidate.request)  # which removes it from the queue
            else:
                break
        for request in passed_over:
            waiting.push(request)
        num_long = sum(request.is_long for request in passed_over)
        self._limiter.num_waiting = max(self._limiter.num_waiting, num_long)

    def _decide(self, candidate: Candidate, policies: Sequence[AdmissionPolicy]) -> Decision:
        """Asks the policies, allocates blocks if all agree, and lets the policies that were asked commit the result."""
        decision, num_asked = Decision.ADMIT, 0
        for policy in policies:
            num_asked += 1
            decision = policy.decide(candidate)
            if decision is not Decision.ADMIT:
                candidate.decided_by = policy
                break
        if decision is Decision.ADMIT and not self._allocate(candidate):
            decision = Decision.STOP
        for policy in policies[:num_asked]:
            policy.commit(candidate, decision)
        return decision

    def _allocate(self, candidate: Candidate) -> bool:
        """Allocates blocks for all tokens of a request. False, with nothing allocated, if it cannot start with them."""
        if not any(candidate.counts):
            return False  # each side of a pair would compute its last token, and the budget is too small for both
        candidate.lacks_blocks = not self._blocks.allocate_first(candidate.sides, candidate.find_blocks)
        if candidate.lacks_blocks:
            return False
        if not self._can_chunk and sum(candidate.left) > candidate.step.budget:
            self._blocks.free(candidate.sides)  # blocks of one side have evicted cached ones of the other
            return False
        return True

    def _start(self, candidate: Candidate) -> None:
        """Plans the first tokens of a request, which has its blocks."""
        request, step = self._requests.run_next(), candidate.step
        positions = []
        for side, start, count in zip(candidate.sides, candidate.starts, candidate.counts):
            self._start_side(side, start, start + count)
            step.plan.new_requests.append(new_request_data(side, start))
            positions.append(step.add(side, count) if count else -1)  # 0: the other side of a pair computes first
        if candidate.share.is_limited and sum(candidate.counts) < sum(candidate.left):
            step.held_back.append((request, positions))

    def _start_side(self, side: Request, start: int, end: int) -> None:
        """Lets a side begin at `start`. The step computes its tokens before `end`."""
        if side.num_cached_tokens < 0:
            side.num_cached_tokens = start
            side.scheduled_time = self._clock()
            if side.primary is None:
                self._stats.num_prompt_tokens += side.num_prompt_tokens
            if not side.needs_every_position and side.table.root is not None:
                self._stats.prefix_cache_queries += side.num_tokens
                self._stats.prefix_cache_hits += start
        self._kv_cache.cache_blocks(side.table, end)
        self._kv_cache.release_host_blocks(side.table)
        side.num_computed_tokens = start

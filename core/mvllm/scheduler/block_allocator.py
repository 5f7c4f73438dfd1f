"""Allocates KV blocks to running requests, if needed by preemption of the last running request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mvllm.kv_cache.kv_cache_manager import KVCacheManager
from mvllm.messages.requests import SchedulerStats
from mvllm.messages.scheduler_output import SchedulerOutput
from mvllm.scheduler.request import Request, RequestStatus
from mvllm.scheduler.request_lists import RequestLists
from mvllm.scheduler.request_outputs import cache_too_small_message
from mvllm.scheduler.swapping import Swapper


class BlockAllocator:
    """Allocates blocks for the step planner.

    Args:
        requests: The requests of the scheduler.
        kv_cache: Allocates blocks.
        stats: Counts preemptions.
        max_num_seqs: Rows of a step.
        num_lookahead_tokens: Slots behind a sequence's last token that a proposer can use.
        swapper: Keeps the blocks of preempted requests in host memory; None if they are always computed again.
    """

    def __init__(
        self,
        requests: RequestLists,
        kv_cache: KVCacheManager,
        stats: SchedulerStats,
        *,
        max_num_seqs: int,
        num_lookahead_tokens: int,
        swapper: Swapper | None,
    ) -> None:
        self._requests = requests
        self._kv_cache = kv_cache
        self._num_groups = kv_cache.num_groups
        self._stats = stats
        self._max_num_seqs = max_num_seqs
        self._num_lookahead = num_lookahead_tokens
        self._swapper = swapper

    def allocate(self, request: Request, drafts: list[int], plan: SchedulerOutput, *, can_preempt: bool = True) -> bool:
        """Gives one side of a running request blocks for its known tokens, and adds them to the plan.

        With draft tokens in flight these are the tokens that it has if all of them are accepted. No request is
        preempted for draft tokens: without free blocks for `drafts` and for lookahead, `drafts` is cleared, and without
        blocks for those in flight it waits for their results.

        Args:
            can_preempt: The last running requests may be preempted for it. Otherwise it gets no blocks for lookahead.

        Returns:
            False if the request cannot compute in this step: it was preempted itself, or ended, or waits for a token in
            flight, or would have to preempt others.
        """
        requests, kv_cache = self._requests, self._kv_cache
        table, num_computed = request.table, request.num_computed_tokens
        lengths: list[int] = [] if self._num_groups == 1 else [len(blocks.block_ids) for blocks in table.groups]
        num_tokens, new_blocks = request.max_num_tokens_in_flight, None
        if can_preempt and (drafts or self._num_lookahead):
            wanted = min(num_tokens + len(drafts) + self._num_lookahead, request.max_num_tokens)
            num_spare = len(requests.running)
            new_blocks = kv_cache.allocate_slots(table, wanted, num_spare=num_spare, num_computed_tokens=num_computed)
            if new_blocks is None:
                drafts.clear()
        if new_blocks is None:
            new_blocks = kv_cache.allocate_slots(table, num_tokens, num_computed_tokens=num_computed)
        while new_blocks is None:
            if not can_preempt or request.num_drafts_in_flight:
                return False
            if len(requests.running) == 1:
                # There is no other request to preempt. Unless a token in flight turns out to be its last, it fails.
                if not request.has_token_in_flight:
                    self.fail_cache_too_small(request.listed)
                return False
            self._stats.num_preemptions += 1
            is_swapped = self._swapper is not None and self._swapper.swap_out(requests.running[-1])
            if requests.preempt_last(is_swapped=is_swapped) is request.listed:
                return False
            new_blocks = kv_cache.allocate_slots(table, num_tokens, num_computed_tokens=num_computed)
        if len(new_blocks) == 1 and self._num_groups == 1:
            plan.new_block_rows.append(request.row)
            plan.new_block_ids += new_blocks
        elif new_blocks:
            self._add_to_plan(request, lengths, new_blocks, plan)
        return True

    def allocate_sides(self, request: Request, counts: list[int], plan: SchedulerOutput, *, can_preempt: bool) -> bool:
        """Gives each side of a running request that has a count blocks for its known tokens, or none.

        Returns:
            False if the request cannot compute in this step, as `allocate`.
        """
        num_planned = len(plan.new_block_ids)
        before: list[tuple[Request, list[int]]] = []
        for side, count in zip(request.sides, counts, strict=True):
            if not count:
                continue
            before.append((side, [len(blocks.block_ids) for blocks in side.table.groups]))
            if self.allocate(side, [], plan, can_preempt=can_preempt):
                continue
            del plan.new_block_rows[num_planned:], plan.new_block_ids[num_planned:]
            if request.status is RequestStatus.RUNNING:
                for other, lengths in before[:-1]:
                    self._kv_cache.take_back(other.table, lengths)
            return False
        return True

    def allocate_first(self, sides: Sequence[Request], find_blocks: Callable[[int], list[int]]) -> bool:
        """Gives all sides of a waiting request blocks for all their tokens, however they are chunked, or none.

        It leaves one block for each running request: a request that is preempted in the next step has computed for
        nothing.

        Args:
            find_blocks: The cached blocks that a side starts with, by its number. Called when the sides before it have
                their blocks, which may have evicted some of these.
        """
        num_spare = self._requests.rows.num_allocated * self._num_groups
        for number, side in enumerate(sides):
            found = find_blocks(number)
            if self._kv_cache.allocate_slots(side.table, side.num_tokens, found, num_spare=num_spare) is None:
                self.free(sides[:number])
                return False
        return True

    def free(self, sides: Sequence[Request]) -> None:
        """Frees the blocks of sides that do not start after all."""
        for side in sides:
            self._kv_cache.free(side.table, 0)

    def _add_to_plan(self, request: Request, lengths: list[int], new_blocks: list[int], plan: SchedulerOutput) -> None:
        """Adds the new blocks of a running request to the plan.

        Args:
            lengths: Blocks in each group before; not read if there is one group.
        """
        row = request.row
        if self._num_groups == 1:
            plan.new_block_rows.extend([row] * len(new_blocks))
        else:
            for blocks, length in zip(request.table.groups, lengths, strict=True):
                plan.new_block_rows.extend([row] * (len(blocks.block_ids) - length))
                row += self._max_num_seqs
        plan.new_block_ids.extend(new_blocks)

    def fail_cache_too_small(self, request: Request) -> None:
        """Fails a request that does not fit although no other request holds blocks."""
        kv_cache, num_tokens = self._kv_cache, sum(side.num_tokens for side in request.sides)
        num_needed = sum(kv_cache.blocks_for(side.num_tokens) for side in request.sides)
        message = cache_too_small_message(num_tokens, num_needed, kv_cache.block_size, kv_cache.num_blocks)
        self._requests.fail(request, message)

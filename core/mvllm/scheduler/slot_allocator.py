"""Gives running requests KV blocks, if needed by preemption of the last running request."""

from __future__ import annotations

from mvllm.kv_cache.kv_cache_manager import KVCacheManager
from mvllm.messages.requests import SchedulerStats
from mvllm.messages.scheduler_output import SchedulerOutput
from mvllm.scheduler.request import Request
from mvllm.scheduler.request_lists import RequestLists
from mvllm.scheduler.request_outputs import cache_too_small_message
from mvllm.scheduler.swapping import Swapper


class SlotAllocator:
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

    def allocate(self, request: Request, num_tokens: int, drafts: list[int], plan: SchedulerOutput) -> bool:
        """Gives a running request blocks, see `get_slots`, and caches the full ones among its first `num_tokens`."""
        if not self.get_slots(request, drafts, plan):
            return False
        self._kv_cache.cache_blocks(request.table, num_tokens)
        return True

    def get_slots(
        self, request: Request, drafts: list[int], plan: SchedulerOutput, *, can_preempt: bool = True
    ) -> bool:
        """Gives a running request, or one side of a guided one, blocks for its known tokens, if needed by preemption.

        No request is preempted for draft tokens: without free blocks for `drafts` and for lookahead, `drafts` is
        cleared.

        Returns:
            False if the request cannot compute in this step: it was preempted itself, or ended, or waits for a token in
            flight, or would have to preempt others.
        """
        requests, kv_cache = self._requests, self._kv_cache
        table, num_computed = request.table, request.num_computed_tokens
        lengths: list[int] = [] if self._num_groups == 1 else [len(blocks.block_ids) for blocks in table.groups]
        new_blocks = None
        if drafts or self._num_lookahead:
            wanted = min(request.num_tokens + len(drafts) + self._num_lookahead, request.max_num_tokens)
            num_spare = len(requests.running)
            new_blocks = kv_cache.allocate_slots(table, wanted, num_spare=num_spare, num_computed_tokens=num_computed)
            if new_blocks is None:
                drafts.clear()
        if new_blocks is None:
            new_blocks = kv_cache.allocate_slots(table, request.num_tokens, num_computed_tokens=num_computed)
        while new_blocks is None:
            if not can_preempt:
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
            new_blocks = kv_cache.allocate_slots(table, request.num_tokens, num_computed_tokens=num_computed)
        if new_blocks:
            self.add_blocks_to_plan(request, lengths, new_blocks, plan)
        return True

    def add_blocks_to_plan(
        self, request: Request, lengths: list[int], new_blocks: list[int], plan: SchedulerOutput
    ) -> None:
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

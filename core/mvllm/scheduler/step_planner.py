"""Plans one step: which request computes how many tokens, in which KV blocks.

There is no prefill phase and no decode phase. A request has `num_tokens` tokens and has computed
`num_computed_tokens` of them; every step lets requests compute the difference, within one token budget:

    a long prompt                 over several steps (chunked prefill)
    a prompt found in the cache   begins in the middle
    a request that generates      is always one token behind
    a preempted request           begins at 0 again

Running requests are planned first, in service order, then waiting ones. If blocks run out, the last running request is
preempted. It has not been planned in this step yet.
"""

from __future__ import annotations

from collections.abc import Callable

from mvllm.config.engine_config import SchedulerConfig
from mvllm.kv_cache.kv_cache_manager import KVCacheManager
from mvllm.messages.requests import SchedulerStats
from mvllm.messages.scheduler_output import SchedulerOutput
from mvllm.scheduler.grammar_masks import DeferredMasks
from mvllm.scheduler.long_prefill_limiter import LongPrefillLimiter
from mvllm.scheduler.lora_admission import LoRAAdmission
from mvllm.scheduler.request import Request
from mvllm.scheduler.request_lists import RequestLists
from mvllm.scheduler.request_outputs import cache_too_small_message, new_request_data
from mvllm.scheduler.step_time_model import StepTimeModel

_BYPASS_FACTOR = 4
"""At most this many times `max_num_seqs` requests bypass the first one that waits for a LoRA slot."""

_MAX_PASSED_OVER = 256
"""Most waiting requests that one step passes over to look for others."""


class StepPlanner:
    """Plans steps over the requests of a scheduler. Arguments as for Scheduler.

    Args:
        stats: Counters to add to.
        step_times: Estimates the times of steps; None if plans must not depend on time.

    Attributes:
        draft_masks: Grammar masks behind the draft tokens of the last plan, by row.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        requests: RequestLists,
        kv_cache: KVCacheManager,
        stats: SchedulerStats,
        clock: Callable[[], float],
        *,
        num_stages: int,
        max_loras: int,
        is_speculative: bool,
        num_lookahead_tokens: int,
        can_defer_masks: bool,
        step_times: StepTimeModel | None = None,
    ) -> None:
        self._config = config
        self._requests = requests
        self._kv_cache = kv_cache
        self._num_groups = kv_cache.num_groups
        self._stats = stats
        self._clock = clock
        self._num_stages = num_stages
        self._is_speculative = is_speculative
        self._num_lookahead = num_lookahead_tokens
        self._long_prefill_limiter = LongPrefillLimiter(config, step_times)
        self._lora_admission = LoRAAdmission(max_loras, max_bypasses=_BYPASS_FACTOR * config.max_num_seqs)
        self.draft_masks: dict[int, list[bytes]] = {}
        self._deferred_masks = DeferredMasks(is_possible=can_defer_masks and num_stages == 1)

    def plan(self, step: int) -> tuple[SchedulerOutput, list[Request]]:
        """Plans a step. Also returns its requests, parallel to the plan's rows."""
        plan = SchedulerOutput(step=step)
        batch: list[Request] = []
        num_preemptions = self._stats.num_preemptions

        long_prefills, waiting = self._long_prefill_limiter, self._requests.waiting
        if long_prefills.were_limited or long_prefills.num_partial:
            long_prefills.start_step()
        budget = self._schedule_running(plan, batch, self._config.max_num_batched_tokens)
        can_admit = num_preemptions == self._stats.num_preemptions  # no request takes the place of a preempted one
        long_prefills.num_waiting = 0
        if can_admit and waiting:
            budget = self._schedule_waiting(plan, batch, budget)
        if budget and long_prefills.were_limited:
            if long_prefills.start_round_2(others_generate=_has_generating_requests(plan)):
                budget = self._schedule_held_back(plan, batch, budget)
                if budget and can_admit and waiting:
                    self._schedule_waiting(plan, batch, budget)
        assert batch or not plan.new_block_rows, "blocks were planned for a row that does not compute"
        return plan, _decodes_first(plan, batch)

    def is_ordinary(self, plan: SchedulerOutput) -> bool:
        """Whether requests generate in the last plan, and no prompt's share is a cap, see `LongPrefillLimiter`."""
        return not self._long_prefill_limiter.is_capped and _has_generating_requests(plan)

    def _schedule_running(self, plan: SchedulerOutput, batch: list[Request], budget: int) -> int:
        """Plans running requests. Returns what is left of the budget."""
        rows, num_scheduled, running = plan.rows, plan.num_scheduled_tokens, self._requests.running
        in_pipeline = self._num_stages > 1
        counts_partial = self._long_prefill_limiter.max_partial is not None
        samples_left = -(-len(running) // self._num_stages)
        self.draft_masks = {}
        self._deferred_masks.start_plan()
        for request in running:  # preemption shortens the list at its end, behind `request`
            num_tokens = request.num_tokens
            if num_tokens >= request.max_num_tokens:
                continue  # its last token is in flight
            if in_pipeline and (request.has_token_in_flight or not samples_left):
                continue
            num_computed = request.num_computed_tokens
            num_new = num_tokens - num_computed
            if not budget:
                break
            if request.grammar is not None and not self._deferred_masks.can_schedule(request, plan):
                continue  # its mask depends on a token in flight, or is being computed
            if num_new > 1:
                share = self._long_prefill_limiter.num_allowed_tokens(num_new, is_very_long=request.is_very_long)
                if share < num_new:
                    self._long_prefill_limiter.held_back.append((request, len(batch) if share else -1))
                    if not share:
                        self._long_prefill_limiter.num_partial += counts_partial
                        continue
                num_new = min(share, budget)
                if counts_partial:
                    self._long_prefill_limiter.num_partial += num_computed + num_new < num_tokens
            end = num_computed + num_new
            drafts = request.draft_token_ids
            if drafts:
                drafts = self._take_draft_tokens(request, budget - num_new - (len(running) - len(batch) - 1))
            # A decoding request needs blocks only when it enters a new one. With speculative decoding it has blocks
            # ahead, and its full blocks get their hashes here. A prompt whose share is one token may get the rest of
            # the budget in `_schedule_held_back`, for which it needs blocks now.
            if num_tokens - num_computed > 1 or end > request.table.num_slots or self._is_speculative:
                if not self._allocate_slots(request, end, drafts, plan):
                    break
            request.num_computed_tokens = end
            if end == num_tokens:
                request.num_tokens = end + 1  # the token that this step samples
                samples_left -= 1
            if drafts and request.grammar is not None:
                self.draft_masks[request.row] = masks = request.grammar.draft_masks(drafts)
                del drafts[len(masks) :]
            if drafts:
                plan.draft_token_ids[len(batch)] = drafts
                num_new += len(drafts)
            rows.append(request.row)
            num_scheduled.append(num_new)
            batch.append(request)
            budget -= num_new
        return budget

    def _schedule_held_back(self, plan: SchedulerOutput, batch: list[Request], budget: int) -> int:
        """Gives the rest of the budget to long prompts, in order and without preemption. Returns what is left."""
        kv_cache = self._kv_cache
        for request, position in self._long_prefill_limiter.held_back:
            table, num_computed = request.table, request.num_computed_tokens
            if position < 0:
                lengths = [len(blocks.block_ids) for blocks in table.groups]
                new_blocks = kv_cache.allocate_slots(table, request.num_tokens, num_computed_tokens=num_computed)
                if new_blocks is None:
                    continue
                self._add_blocks_to_plan(request, lengths, new_blocks, plan)
                position = len(batch)
                plan.rows.append(request.row)
                plan.num_scheduled_tokens.append(0)
                batch.append(request)
            num_new = min(request.num_tokens - num_computed, budget)
            plan.num_scheduled_tokens[position] += num_new
            end = request.num_computed_tokens = num_computed + num_new
            kv_cache.cache_blocks(table, end)
            if end == request.num_tokens:
                request.num_tokens = end + 1  # the token that this step samples
            budget -= num_new
            if not budget:
                break
        return budget

    def _schedule_waiting(self, plan: SchedulerOutput, batch: list[Request], budget: int) -> int:
        """Admits waiting requests in order, until one does not fit. Returns what is left of the budget.

        A request that waits for a LoRA slot, for a mask, or for other long prompts is passed over.
        """
        requests, kv_cache = self._requests, self._kv_cache
        waiting, lora_admission, long_prefills = requests.waiting, self._lora_admission, self._long_prefill_limiter
        if lora_admission.max_loras:
            lora_admission.start_round(request.lora_int_id for request in requests.running)
        passed_over: list[Request] = []
        while waiting and budget and requests.rows.num_free:
            request = waiting.peek()
            if (request.lora_int_id and not lora_admission.can_admit(request)) or (
                request.is_long and not long_prefills.has_room
            ):
                if len(passed_over) >= _MAX_PASSED_OVER:
                    break
                passed_over.append(waiting.pop())
                continue
            if request.awaits_mask:  # a preempted request, which goes on when its mask is computed
                passed_over.append(waiting.pop())
                continue
            table, num_tokens = request.table, request.num_tokens
            computed_blocks = [] if request.needs_every_position else kv_cache.get_computed_blocks(table)
            num_computed = len(computed_blocks) // self._num_groups * kv_cache.block_size
            num_new = num_tokens - num_computed
            if num_new > budget and not self._config.enable_chunked_prefill:
                break
            if not long_prefills.can_start(num_new, budget):
                break
            request.is_very_long = long_prefills.is_very_long(num_new)
            share = long_prefills.num_allowed_tokens(num_new, is_very_long=request.is_very_long)
            request.is_long = not share
            if request.is_long:
                continue
            is_held_back, num_new = share < num_new, min(share, budget)
            # It gets blocks for all of its tokens at once, however it is chunked, and leaves one block for each running
            # request: a request that is preempted in the next step has computed for nothing.
            num_spare = len(requests.running) * self._num_groups
            new_blocks = kv_cache.allocate_slots(table, num_tokens, computed_blocks, num_spare=num_spare)
            if new_blocks is None:
                if requests.running:
                    break
                self._fail_cache_too_small(request)
                continue
            if request.lora_int_id:
                lora_admission.record_admission(request)
            self._admit_next(num_computed, num_new, plan)
            if is_held_back:
                long_prefills.held_back.append((request, len(batch)))
            batch.append(request)
            budget -= num_new
            if long_prefills.max_partial is not None:
                long_prefills.num_partial += num_computed + num_new < num_tokens
        for request in passed_over:
            waiting.push(request)
        if passed_over:
            long_prefills.num_waiting = max(long_prefills.num_waiting, sum(request.is_long for request in passed_over))
        return budget

    def _admit_next(self, num_computed: int, num_new: int, plan: SchedulerOutput) -> None:
        """Runs the next waiting request, which has its blocks, and plans its first tokens."""
        request = self._requests.run_next()
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_computed
            request.scheduled_time = self._clock()
            self._stats.num_prompt_tokens += request.num_prompt_tokens
            if not request.needs_every_position and request.table.root is not None:
                self._stats.prefix_cache_queries += request.num_tokens
                self._stats.prefix_cache_hits += num_computed
        end = num_computed + num_new
        self._kv_cache.cache_blocks(request.table, end)
        request.num_computed_tokens = end
        plan.new_requests.append(new_request_data(request, num_computed))
        plan.rows.append(request.row)
        plan.num_scheduled_tokens.append(num_new)
        if end == request.num_tokens:
            request.num_tokens = end + 1  # the token that this step samples

    def _take_draft_tokens(self, request: Request, budget: int) -> list[int]:
        """Removes a running request's draft tokens, and returns as many as the budget allows."""
        drafts, request.draft_token_ids = request.draft_token_ids, []
        if request.num_computed_tokens + 1 < request.num_tokens:
            return []
        # The step also samples a token behind the last draft token; that may be the request's last one.
        return drafts[: max(0, min(budget, request.max_num_tokens - request.num_tokens - 1))]

    def _allocate_slots(self, request: Request, num_tokens: int, drafts: list[int], plan: SchedulerOutput) -> bool:
        """Gives a running request blocks for its first `num_tokens` tokens, if needed by preemption.

        No request is preempted for draft tokens: without free blocks for `drafts` and for lookahead, `drafts` is
        cleared.

        Returns:
            False if the request cannot compute in this step: it was preempted itself, or ended, or waits for a token in
            flight.
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
            if len(requests.running) == 1:
                # There is no other request to preempt. Unless a token in flight turns out to be its last, it fails.
                if not request.has_token_in_flight:
                    self._fail_cache_too_small(request)
                return False
            self._stats.num_preemptions += 1
            if requests.preempt_last() is request:
                return False
            new_blocks = kv_cache.allocate_slots(table, request.num_tokens, num_computed_tokens=num_computed)
        if new_blocks:
            self._add_blocks_to_plan(request, lengths, new_blocks, plan)
        kv_cache.cache_blocks(table, num_tokens)
        return True

    def _add_blocks_to_plan(
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
                row += self._config.max_num_seqs
        plan.new_block_ids.extend(new_blocks)

    def _fail_cache_too_small(self, request: Request) -> None:
        """Fails a request that does not fit although no other request holds blocks."""
        kv_cache, num_tokens = self._kv_cache, request.num_tokens
        num_needed = kv_cache.blocks_for(num_tokens)
        message = cache_too_small_message(num_tokens, num_needed, kv_cache.block_size, kv_cache.num_blocks)
        self._requests.fail(request, message)


def _has_generating_requests(plan: SchedulerOutput) -> bool:
    """Whether a request in the plan generates, as far as its numbers of tokens say."""
    return 1 in plan.num_scheduled_tokens or bool(plan.draft_token_ids)


def _decodes_first(plan: SchedulerOutput, batch: list[Request]) -> list[Request]:
    """Moves rows with one token besides draft tokens to the front, in their order. Returns the reordered batch."""
    num_scheduled, drafts = plan.num_scheduled_tokens, plan.draft_token_ids
    if sum(num_scheduled) == len(num_scheduled) + sum(map(len, drafts.values())):
        return batch  # nothing but decode rows
    is_decode = [num == 1 for num in num_scheduled]
    for position, tokens in drafts.items():
        is_decode[position] = num_scheduled[position] == 1 + len(tokens)
    num_decodes = sum(is_decode)
    if all(is_decode[:num_decodes]):
        return batch
    order = sorted(range(len(batch)), key=is_decode.__getitem__, reverse=True)  # stable, reversed or not
    plan.rows = [plan.rows[i] for i in order]
    plan.num_scheduled_tokens = [num_scheduled[i] for i in order]
    if drafts:
        plan.draft_token_ids = {new: drafts[old] for new, old in enumerate(order) if old in drafts}
    return [batch[i] for i in order]

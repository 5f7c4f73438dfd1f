"""Plans one step: which request computes how many tokens, in which KV blocks.

There is no prefill phase and no decode phase. A request has `num_tokens` tokens and has computed
`num_computed_tokens` of them; every step lets requests compute the difference, within one token budget:

    a long prompt                 over several steps (chunked prefill)
    a prompt found in the cache   begins in the middle
    a request that generates      is always one token behind
    a preempted request           begins at 0 again

Running requests are planned first, in service order, then waiting ones. If blocks run out, the last running request is
preempted. It has not been planned in this step yet.

In prompts with images or audio a step ends before an item that cannot be encoded in it (see `encoder_planner.py`).

A guided request has two sides with a row and blocks each, which are planned together (see `guidance.py`).

In models with sequence states each row also reads and writes a state slot. The steps of a prompt end where its state
is kept for other requests (see `kv_cache/state_slots.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from mvllm.config.engine_config import SchedulerConfig
from mvllm.kv_cache.kv_cache_manager import KVCacheManager
from mvllm.messages.requests import SchedulerStats
from mvllm.messages.scheduler_output import SchedulerOutput
from mvllm.scheduler.batch_order import decodes_first
from mvllm.scheduler.encoder_planner import EncoderPlanner
from mvllm.scheduler.grammar_masks import DeferredMasks
from mvllm.scheduler.guidance import split_tokens
from mvllm.scheduler.kv_loads import KVLoads
from mvllm.scheduler.long_prefill_limiter import LongPrefillLimiter
from mvllm.scheduler.lora_admission import LoRAAdmission
from mvllm.scheduler.request import Request, RequestStatus
from mvllm.scheduler.request_lists import RequestLists
from mvllm.scheduler.request_outputs import new_request_data
from mvllm.scheduler.slot_allocator import SlotAllocator
from mvllm.scheduler.state_planner import StatePlanner
from mvllm.scheduler.step_time_model import StepTimeModel
from mvllm.scheduler.swapping import Swapper

_BYPASS_FACTOR = 4
"""At most this many times `max_num_seqs` requests bypass the first one that waits for a LoRA slot."""

_MAX_PASSED_OVER = 256
"""Most waiting requests that one step passes over to look for others."""


class StepPlanner:
    """Plans steps over the requests of a scheduler. Arguments as for Scheduler.

    Args:
        stats: Counters to add to.
        step_times: Estimates the times of steps; None if plans must not depend on time.
        kv_loads: Requests that wait for KV connectors; None without a host tier.
        swapper: Keeps the blocks of preempted requests in host memory; None if they are always computed again.
        encoders: Plans the encoders of images and audio; None if no request has items.

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
        kv_loads: KVLoads | None = None,
        swapper: Swapper | None = None,
        encoders: EncoderPlanner | None = None,
    ) -> None:
        self._config = config
        self._requests = requests
        self._kv_cache = kv_cache
        self._num_groups = kv_cache.num_groups
        self._states = StatePlanner(kv_cache.states, can_chunk=config.enable_chunked_prefill)
        self._stats = stats
        self._clock = clock
        self._num_stages = num_stages
        self._is_speculative = is_speculative
        self._long_prefill_limiter = LongPrefillLimiter(config, step_times)
        self._kv_loads = kv_loads
        self._encoders = encoders
        assert encoders is None or not (encoders.keeps_spans_whole and self._states.is_needed), (
            "whole spans and snapshots want different ends of steps"
        )
        self._slots = SlotAllocator(
            requests,
            kv_cache,
            stats,
            max_num_seqs=config.max_num_seqs,
            num_lookahead_tokens=num_lookahead_tokens,
            swapper=swapper,
        )
        self._lora_admission = LoRAAdmission(max_loras, max_bypasses=_BYPASS_FACTOR * config.max_num_seqs)
        self.draft_masks: dict[int, list[bytes]] = {}
        self._recompute_planned = False
        self._deferred_masks = DeferredMasks(is_possible=can_defer_masks and num_stages == 1)

    def plan(self, step: int) -> tuple[SchedulerOutput, list[Request]]:
        """Plans a step. Also returns its requests, parallel to the plan's rows."""
        plan = SchedulerOutput(step=step)
        batch: list[Request] = []
        num_preemptions = self._stats.num_preemptions

        if self._kv_loads is not None:
            self._kv_loads.start_plan()
        self._states.start_plan()
        if self._encoders is not None:
            self._encoders.start_plan()
        long_prefills, waiting = self._long_prefill_limiter, self._requests.waiting
        if long_prefills.were_limited or long_prefills.num_partial:
            long_prefills.start_step()
        budget = self._schedule_running(plan, batch, self._config.max_num_batched_tokens)
        can_admit = num_preemptions == self._stats.num_preemptions  # no request takes the place of a preempted one
        long_prefills.num_waiting = 0
        if can_admit and waiting:
            budget = self._schedule_waiting(plan, batch, budget)
        if budget and long_prefills.were_limited:
            if long_prefills.start_round_2(others_generate=self._has_generating_requests(plan)):
                budget = self._schedule_held_back(plan, batch, budget)
                if budget and can_admit and waiting:
                    self._schedule_waiting(plan, batch, budget)
        assert batch or not plan.new_block_rows, "blocks were planned for a row that does not compute"
        batch = decodes_first(plan, batch)
        self._states.end_plan(plan, batch)
        if self._encoders is not None:
            self._encoders.end_plan()
        return plan, batch

    def is_ordinary(self, plan: SchedulerOutput) -> bool:
        """Whether requests generate in the last plan, and no prompt's share is a cap, see `LongPrefillLimiter`."""
        return not self._long_prefill_limiter.is_capped and self._has_generating_requests(plan)

    def _has_generating_requests(self, plan: SchedulerOutput) -> bool:
        """Whether a request in the plan generates, as far as its numbers of tokens say."""
        return 1 in plan.num_scheduled_tokens or bool(plan.draft_token_ids) or self._recompute_planned

    def _schedule_running(self, plan: SchedulerOutput, batch: list[Request], budget: int) -> int:
        """Plans running requests. Returns what is left of the budget."""
        rows, num_scheduled, running = plan.rows, plan.num_scheduled_tokens, self._requests.running
        in_pipeline, ends_at_snapshots = self._num_stages > 1, self._states.ends_steps
        counts_partial = self._long_prefill_limiter.max_partial is not None
        has_special = self._requests.num_guided > 0 or self._requests.num_with_items > 0
        samples_left = -(-len(running) // self._num_stages)
        self.draft_masks = {}
        self._recompute_planned = False
        self._deferred_masks.start_plan()
        for request in running:  # preemption shortens the list at its end, behind `request`
            num_tokens, held_back = request.num_tokens, False
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
            if has_special and (request.companion is not None or num_computed < request.items_end):
                schedule = self._schedule_items if request.companion is None else self._schedule_pair
                num_new = schedule(request, plan, batch, budget)
                if num_new < 0:
                    break
                budget -= num_new
                samples_left -= request.num_tokens > num_tokens
                continue
            if num_new > 1:
                share = num_new
                if request.recomputes:  # it generates
                    self._recompute_planned = True
                else:
                    share = self._long_prefill_limiter.num_allowed_tokens(num_new, is_very_long=request.is_very_long)
                if not share:
                    self._long_prefill_limiter.held_back.append((request, -1))
                    self._long_prefill_limiter.num_partial += counts_partial
                    continue
                held_back = share < num_new
                num_new = min(share, budget)
                if ends_at_snapshots:
                    num_new = min(num_new, request.table.state.next_snapshot - num_computed)
                if counts_partial and not request.recomputes:
                    self._long_prefill_limiter.num_partial += num_computed + num_new < num_tokens
            end = num_computed + num_new
            drafts = request.draft_token_ids
            if drafts:
                drafts = self._take_draft_tokens(request, budget - num_new - (len(running) - len(batch) - 1))
            # A decoding request needs blocks only when it enters a new one. With speculative decoding it has blocks
            # ahead, and its full blocks get their hashes here. A prompt whose share is one token may get the rest of
            # the budget in `_schedule_held_back`, for which it needs blocks now.
            if num_tokens - num_computed > 1 or end > request.table.num_slots or self._is_speculative:
                if not self._slots.allocate(request, end, drafts, plan):
                    break
            request.num_computed_tokens = end
            if end == num_tokens:
                request.num_tokens = end + 1  # the token that this step samples
                request.recomputes = False
                samples_left -= 1
            if drafts and request.grammar is not None:
                self.draft_masks[request.row] = masks = request.grammar.draft_masks(drafts)
                del drafts[len(masks) :]
            if drafts:
                plan.draft_token_ids[len(batch)] = drafts
                num_new += len(drafts)
                self._states.reserve_draft_slot(request)
            if held_back:  # it has its blocks: a request that was preempted for them is not in the batch
                self._long_prefill_limiter.held_back.append((request, len(batch)))
            rows.append(request.row)
            num_scheduled.append(num_new)
            batch.append(request)
            budget -= num_new
        return budget

    def _schedule_items(self, request: Request, plan: SchedulerOutput, batch: list[Request], budget: int) -> int:
        """Plans a running request that has not passed the last item of its prompt.

        Returns:
            The tokens planned; -1 if the request was preempted or has ended. 0 if it waits for other long prompts, or
            until its next item can be encoded.
        """
        limiter, encoders, num_computed = self._long_prefill_limiter, self._encoders, request.num_computed_tokens
        assert encoders is not None
        left = request.num_tokens - num_computed
        share = limiter.num_allowed_tokens(left, is_very_long=request.is_very_long) if left > 1 else left
        if not share:
            limiter.held_back.append((request, -1))
        num_new = min(share, budget, self._states.room(request))
        if num_new:
            num_new = encoders.limit(request, num_computed, num_new, budget)
        end = num_computed + num_new
        if num_new and not self._slots.allocate(request, end, [], plan):
            return -1
        limiter.num_partial += limiter.max_partial is not None and num_new < left
        if not num_new:
            return 0
        encoders.reserve(request, num_computed, end, plan)
        if num_new < left and share < left:
            limiter.held_back.append((request, len(batch)))
        plan.rows.append(request.row)
        plan.num_scheduled_tokens.append(num_new)
        batch.append(request)
        request.num_computed_tokens = end
        if end == request.num_tokens:
            request.num_tokens = end + 1  # the token that this step samples
        return num_new

    def _schedule_held_back(self, plan: SchedulerOutput, batch: list[Request], budget: int) -> int:
        """Gives the rest of the budget to long prompts, in order and without preemption. Returns what is left."""
        kv_cache = self._kv_cache
        for request, position in self._long_prefill_limiter.held_back:
            if request.companion is not None:
                budget -= max(0, self._schedule_pair(request, plan, batch, budget, can_preempt=False))
                if not budget:
                    break
                continue
            table, num_computed = request.table, request.num_computed_tokens
            room = self._states.room(request)
            if not room:
                continue  # the first round has planned it up to a snapshot
            num_new = min(request.num_tokens - num_computed, budget, room)
            encoders = self._encoders if num_computed < request.items_end else None
            if encoders is not None:
                num_new = encoders.limit(request, num_computed, num_new, budget)
                if not num_new:
                    continue
            if position < 0:
                lengths = [len(blocks.block_ids) for blocks in table.groups]
                new_blocks = kv_cache.allocate_slots(table, request.num_tokens, num_computed_tokens=num_computed)
                if new_blocks is None:
                    continue
                self._slots.add_blocks_to_plan(request, lengths, new_blocks, plan)
                position = len(batch)
                plan.rows.append(request.row)
                plan.num_scheduled_tokens.append(0)
                batch.append(request)
            plan.num_scheduled_tokens[position] += num_new
            end = request.num_computed_tokens = num_computed + num_new
            if encoders is not None:
                encoders.reserve(request, num_computed, end, plan)
            kv_cache.cache_blocks(table, end)
            if end == request.num_tokens:
                request.num_tokens = end + 1  # the token that this step samples
            budget -= num_new
            if not budget:
                break
        return budget

    def _schedule_waiting(self, plan: SchedulerOutput, batch: list[Request], budget: int) -> int:
        """Admits waiting requests in order, until one does not fit. Returns what is left of the budget.

        A request that waits for a LoRA slot, for a mask, for other long prompts, or for the snapshot of another request
        is passed over.
        """
        requests, kv_cache, states = self._requests, self._kv_cache, self._states
        waiting, lora_admission, long_prefills = requests.waiting, self._lora_admission, self._long_prefill_limiter
        if lora_admission.max_loras:
            lora_admission.start_round(request.lora_int_id for request in requests.running)
        passed_over: list[Request] = []
        while waiting and budget and requests.rows.num_free:
            request = waiting.peek()
            if (
                (request.lora_int_id and not lora_admission.can_admit(request))
                or (request.is_long and not long_prefills.has_room)
                or (states.is_needed and states.still_waits(request))
            ):
                if len(passed_over) >= _MAX_PASSED_OVER:
                    break
                passed_over.append(waiting.pop())
                continue
            if request.awaits_mask:  # a preempted request, which goes on when its mask is computed
                passed_over.append(waiting.pop())
                continue
            if request.companion is not None:
                num_new = self._admit_pair(request, plan, batch, budget)
                if num_new < 0:
                    break
                budget -= num_new
                continue
            table, num_tokens = request.table, request.num_tokens
            computed_blocks = [] if request.needs_every_position else kv_cache.get_computed_blocks(table)
            num_computed = len(computed_blocks) // self._num_groups * kv_cache.block_size
            num_new, room = num_tokens - num_computed, sys.maxsize
            if num_new > budget and not self._config.enable_chunked_prefill:
                break
            if states.is_needed:
                if states.must_wait(request, num_computed):
                    continue  # is passed over
                room = states.choose_snapshots(request, num_computed)
            if not long_prefills.can_start(num_new, min(budget, room)):
                break
            request.is_very_long = long_prefills.is_very_long(num_new)
            share = long_prefills.num_allowed_tokens(num_new, is_very_long=request.is_very_long)
            request.is_long = not share
            if request.is_long:
                continue
            is_held_back, num_new = share < num_new, min(share, budget, room)
            if request.items and self._encoders is not None:
                num_new = self._encoders.limit(request, num_computed, num_new, budget)
                if not num_new or (num_computed + num_new < num_tokens and not self._config.enable_chunked_prefill):
                    break
            # It gets blocks for all of its tokens at once, however it is chunked, and leaves one block for each running
            # request: a request that is preempted in the next step has computed for nothing.
            num_spare = requests.rows.num_allocated * self._num_groups
            new_blocks = kv_cache.allocate_slots(table, num_tokens, computed_blocks, num_spare=num_spare)
            if new_blocks is None:
                if requests.running:
                    break
                self._slots.fail_cache_too_small(request)
                continue
            if request.lora_int_id:
                lora_admission.record_admission(request)
            self._start(requests.run_next(), num_computed, num_new, plan)
            if request.items and self._encoders is not None:
                self._encoders.reserve(request, num_computed, num_computed + num_new, plan)
            if is_held_back and num_computed + num_new < num_tokens:  # items may have made it longer
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

    def _start(self, request: Request, num_computed: int, num_new: int, plan: SchedulerOutput) -> None:
        """Plans the first tokens of a request that has just got its row and its blocks; `num_new` may be 0."""
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_computed
            request.scheduled_time = self._clock()
            if request.primary is None:
                self._stats.num_prompt_tokens += request.num_prompt_tokens
            if not request.needs_every_position and request.table.root is not None:
                self._stats.prefix_cache_queries += request.num_tokens
                self._stats.prefix_cache_hits += num_computed
        end = num_computed + num_new
        self._kv_cache.cache_blocks(request.table, end)
        self._kv_cache.release_host_blocks(request.table)
        request.num_computed_tokens = end
        self._states.record_start(request)
        plan.new_requests.append(new_request_data(request, num_computed))
        if not num_new:
            return  # the other side of a pair computes first
        plan.rows.append(request.row)
        plan.num_scheduled_tokens.append(num_new)
        if end == request.num_tokens:
            request.num_tokens = end + 1  # the token that this step samples

    # ------------------------------------------------------------------------------------------------------ guidance

    def _schedule_pair(
        self, request: Request, plan: SchedulerOutput, batch: list[Request], budget: int, *, can_preempt: bool = True
    ) -> int:
        """Plans both sides of a running guided request.

        Args:
            can_preempt: Other requests may be preempted. Otherwise it is the second round of the step, in which the
                sides may have tokens already.

        Returns:
            The tokens planned; -1 if the request was preempted or has ended, or if it waits for blocks.
        """
        limiter, sides = self._long_prefill_limiter, request.sides
        left = [side.num_tokens - side.num_computed_tokens for side in sides]
        total = sum(left)
        share = limiter.num_allowed_tokens(total, is_very_long=request.is_very_long) if total > len(sides) else total
        counts = split_tokens(left[0], left[1], min(share, budget), *map(self._states.room, sides))
        if not self._allocate_pair_slots(request, counts, plan, can_preempt=can_preempt):
            return -1
        if can_preempt:
            if share < total:
                limiter.held_back.append((request, -1))
            limiter.num_partial += limiter.max_partial is not None and sum(counts) < total
        for side, num_new in zip(sides, counts, strict=True):
            self._plan_tokens(side, num_new, plan, batch, is_first=can_preempt)
        return sum(counts)

    def _plan_tokens(
        self, side: Request, num_new: int, plan: SchedulerOutput, batch: list[Request], *, is_first: bool
    ) -> None:
        """Plans further tokens of one side of a running guided request, which has blocks for them.

        Args:
            is_first: The side has no tokens in this step yet.
        """
        if not num_new:
            return
        position = len(batch) if is_first or side.row not in plan.rows else batch.index(side)
        if position == len(batch):
            plan.rows.append(side.row)
            plan.num_scheduled_tokens.append(0)
            batch.append(side)
        plan.num_scheduled_tokens[position] += num_new
        end = side.num_computed_tokens = side.num_computed_tokens + num_new
        self._kv_cache.cache_blocks(side.table, end)
        if end == side.num_tokens:
            side.num_tokens = end + 1  # the token that this step samples

    def _allocate_pair_slots(
        self, request: Request, counts: tuple[int, int], plan: SchedulerOutput, *, can_preempt: bool
    ) -> bool:
        """Gives both sides of a running guided request blocks for their known tokens, or neither.

        Returns:
            False if the request cannot compute in this step, as `_allocate_slots`.
        """
        num_planned, held = len(plan.new_block_ids), [len(blocks.block_ids) for blocks in request.table.groups]
        for side, num_new in zip(request.sides, counts, strict=True):
            # In the second round a side with tokens has blocks for all that a step may compute. Another call would free
            # blocks that the first of these tokens attends to.
            if not num_new or (not can_preempt and side.row in plan.rows):
                continue
            if self._slots.get_slots(side, [], plan, can_preempt=can_preempt):
                continue
            del plan.new_block_rows[num_planned:], plan.new_block_ids[num_planned:]
            if request.status is RequestStatus.RUNNING:
                self._kv_cache.take_back(request.table, held)
            return False
        return True

    def _admit_pair(self, request: Request, plan: SchedulerOutput, batch: list[Request], budget: int) -> int:
        """Admits the next waiting request, which is guided.

        Returns:
            The tokens planned; -1 if it does not fit now. 0 if it has failed, or waits for other long prompts, or for a
            snapshot.
        """
        requests, kv_cache, long_prefills = self._requests, self._kv_cache, self._long_prefill_limiter
        if requests.rows.num_free < len(request.sides):
            return -1
        num_computed = [self._num_cached(self._find_cached(side)) for side in request.sides]
        left = [side.num_tokens - computed for side, computed in zip(request.sides, num_computed, strict=True)]
        total = sum(left)
        if any(map(self._states.must_wait, request.sides, num_computed)):
            return 0
        rooms = list(map(self._states.choose_snapshots, request.sides, num_computed))
        if not long_prefills.can_start(total, min(budget, *rooms)):
            return -1
        request.is_very_long = long_prefills.is_very_long(total)
        share = long_prefills.num_allowed_tokens(total, is_very_long=request.is_very_long)
        request.is_long = not share
        if request.is_long:
            return 0
        is_held_back = share < total
        num_computed = self._allocate_admitted_pair(request)
        if not num_computed:
            return 0 if request.status is RequestStatus.FINISHED else -1
        left = [side.num_tokens - computed for side, computed in zip(request.sides, num_computed, strict=True)]
        total = sum(left)  # may have grown: blocks for one side evict cached ones that the other side would share
        rooms = list(map(self._states.choose_snapshots, request.sides, num_computed))
        counts = split_tokens(left[0], left[1], min(share, budget) if is_held_back else budget, *rooms)
        if not any(counts) or (sum(counts) < total and not self._config.enable_chunked_prefill):
            for side in request.sides:
                kv_cache.free(side.table, 0)
            return -1
        if request.lora_int_id:
            self._lora_admission.record_admission(request)
        requests.run_next()
        for side, computed, num_new in zip(request.sides, num_computed, counts, strict=True):
            self._start(side, computed, num_new, plan)
            if num_new:
                batch.append(side)
        if is_held_back:
            long_prefills.held_back.append((request, -1))
        if long_prefills.max_partial is not None:
            long_prefills.num_partial += sum(counts) < total
        return sum(counts)

    def _allocate_admitted_pair(self, request: Request) -> list[int]:
        """Gives both sides of a waiting guided request blocks for all their tokens, or neither.

        Returns:
            The tokens of each side that were found in the prefix cache; empty if there are not enough blocks. The
            request has failed if no other one holds blocks.
        """
        requests, kv_cache = self._requests, self._kv_cache
        num_spare = requests.rows.num_allocated * self._num_groups
        num_computed = []
        for side in request.sides:
            found = self._find_cached(side)
            if kv_cache.allocate_slots(side.table, side.num_tokens, found, num_spare=num_spare) is None:
                kv_cache.free(request.table, 0)
                if not requests.running:
                    self._slots.fail_cache_too_small(request)
                return []
            num_computed.append(self._num_cached(found))
        return num_computed

    def _find_cached(self, request: Request) -> list[int]:
        """The blocks of a waiting request that are in the prefix cache."""
        return [] if request.needs_every_position else self._kv_cache.get_computed_blocks(request.table)

    def _num_cached(self, blocks: list[int]) -> int:
        """Tokens in blocks found in the prefix cache."""
        return len(blocks) // self._num_groups * self._kv_cache.block_size

    # -------------------------------------------------------------------------------------------------------- blocks

    def _take_draft_tokens(self, request: Request, budget: int) -> list[int]:
        """Removes a running request's draft tokens, and returns as many as the budget allows."""
        drafts, request.draft_token_ids = request.draft_token_ids, []
        if request.num_computed_tokens + 1 < request.num_tokens:
            return []
        if self._states.is_needed:
            budget = min(budget, self._states.draft_budget(request, others_wait=bool(self._requests.waiting)))
        # The step also samples a token behind the last draft token; that may be the request's last one.
        return drafts[: max(0, min(budget, request.max_num_tokens - request.num_tokens - 1))]

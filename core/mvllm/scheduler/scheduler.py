"""Plans steps: which request computes how many tokens, in which KV blocks.

The idea: there is no prefill phase and no decode phase. A request has tokens (`num_tokens`) and has computed some of
them (`num_computed_tokens`); every step lets requests catch up, under one budget of tokens. A long prompt catches up
over several steps (chunked prefill), a prompt found in the cache starts half-way, a request that generates is always
one token behind, a preempted one starts again from nothing. All are the same line: `num_tokens - num_computed_tokens`.

Two more ideas keep the rest short:

- Service order is one sort key. Requests wait in that order and run in that order, so the one that must give way when
  memory is short is always the last of those running, and it has not been planned yet in the step being planned.
- A plan is a promise. `schedule` counts what it plans as done: tokens as computed, a sample as a token that is merely
  not known yet (in flight). So the next step can be planned before the results of this one are back; results that come
  back for a request that has ended meanwhile are dropped. Where a request fails, others may have been planned that read
  what it should have written: they start again, and the results of what they had under way are dropped as well.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterable

from mvllm.config.engine_config import SchedulerConfig
from mvllm.errors import PlatformError, RequestError
from mvllm.kv_cache.block_table import BlockTable
from mvllm.kv_cache.kv_cache_manager import KVCacheManager
from mvllm.messages.requests import (
    NOTHING_TO_SAMPLE,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    SchedulerStats,
)
from mvllm.messages.scheduler_output import ModelRunnerOutput, SchedulerOutput
from mvllm.scheduler.config_check import check_scheduler_config
from mvllm.scheduler.grammar_masks import DeferredMasks, add_masks, masks_of_batch
from mvllm.scheduler.integrity import check_requests
from mvllm.scheduler.long_prefill_limiter import LongPrefillLimiter
from mvllm.scheduler.lora_admission import LoRAAdmission
from mvllm.scheduler.request import RESTARTED, Grammar, Request, RequestStatus
from mvllm.scheduler.request_outputs import (
    cache_too_small_message,
    collect_logprobs,
    count_draft_tokens,
    final_output,
    make_output,
    new_request_data,
)
from mvllm.scheduler.request_queue import RequestQueue
from mvllm.scheduler.row_allocator import RowAllocator

_BYPASS_FACTOR = 4
_MAX_PASSED_OVER = 256
"""A request whose adapter has to wait lets at most this many times `max_num_seqs` others with adapters past, and is
passed over by nobody who waits behind so many like it."""


class Scheduler:
    """Owner of all requests from `add_request` to their last output. Used from one thread.

    Every plan must be executed, in order, and followed by its `update_from_output`, also an empty plan. Results may lag
    behind by any number of plans.

    Args:
        config: Limits and policy.
        max_model_len: Longest sequence, prompt and output together, in tokens.
        kv_cache: The blocks to give out; the scheduler is its only user.
        clock: Seconds, monotonic.
        max_loras: Most different adapters among the requests that run.
        num_stages: Stages of the pipeline that runs the plans. With more than one, a request is part of one step at a
            time (its next plan waits for its token), and those that generate are dealt out over as many steps.
        num_speculative_tokens: Most tokens that workers guess for a sequence. Then, too, a request is part of one step
            at a time.
        num_lookahead_tokens: Slots behind a sequence's last token that workers can use for guessing.
        can_defer_masks: Whether plans may say `masks_follow`. Whoever executes such a plan asks for `masks` when the
            results of the plan before it are taken in.

    Raises:
        ConfigError: The limits contradict each other.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        max_model_len: int,
        kv_cache: KVCacheManager,
        clock: Callable[[], float] = time.monotonic,
        num_stages: int = 1,
        max_loras: int = 0,
        num_speculative_tokens: int = 0,
        num_lookahead_tokens: int = 0,
        can_defer_masks: bool = False,
    ) -> None:
        check_scheduler_config(config, max_model_len)
        self._config = config
        self._max_model_len = max_model_len
        self._kv_cache = kv_cache
        self._unconfirmed = kv_cache.unconfirmed
        self._clock = clock
        self._num_stages = num_stages
        self._long_prefill_limiter = LongPrefillLimiter(config)
        self._lora_admission = LoRAAdmission(max_loras, max_bypasses=_BYPASS_FACTOR * config.max_num_seqs)
        self._num_groups = kv_cache.num_groups

        self._requests: dict[str, Request] = {}  # every request that is not finished
        self._waiting = RequestQueue()
        self._blocked_requests: set[Request] = set()  # waiting for something other than their turn
        self._running: list[Request] = []  # in service order
        self._rows = RowAllocator(config.max_num_seqs)

        self._batches: dict[int, list[Request]] = {}  # step -> who computes in it, for steps whose results are not back
        self._prompt_starts: dict[int, dict[int, int]] = {}  # step -> position in batch -> first position computed
        self._pending_outputs: list[EngineCoreOutput] = []
        self._next_step = 0
        self._num_added = 0
        self._num_prompt_logprobs = 0  # unfinished requests that want them
        self._num_grammars = 0  # unfinished requests that have one
        self._deferred_masks = DeferredMasks(is_possible=can_defer_masks and num_stages == 1)
        self._num_lookahead = num_lookahead_tokens
        self._is_speculative = num_speculative_tokens > 0
        self._stats = SchedulerStats(accepted_at=[0] * num_speculative_tokens)

    # ---------------------------------------------------------------------------------------- requests come and go

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that do not."""
        return len(self._waiting) + len(self._blocked_requests)

    @property
    def next_step(self) -> int:
        """The number of the next plan."""
        return self._next_step

    @property
    def request_ids(self) -> list[str]:
        """All that are not finished."""
        return list(self._requests)

    def has_requests(self) -> bool:
        """Whether something waits, runs or has an output that was not handed out."""
        return bool(self._requests or self._pending_outputs)

    @property
    def is_waiting_for_masks(self) -> bool:
        """Whether nothing can be done before a grammar, or its next mask, is there. While no results are to come."""
        if self._pending_outputs or not (self._blocked_requests or self._num_grammars):
            return False
        return all(request.awaits_mask for requests in (self._running, self._waiting) for request in requests)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queues a request; one with `structured_outputs` waits aside for `start_grammar` or `fail_request`.

        Raises:
            RequestError: The id is in use, or the prompt is empty or leaves no room for a token.
        """
        prompt = request.prompt_token_ids
        if request.request_id in self._requests:
            raise RequestError(f"Request id {request.request_id!r} is in use.", parameter="request_id")
        room = int(request.pooling_params is None)  # for a token to be generated
        if not 0 < len(prompt) <= self._max_model_len - room:
            raise RequestError(
                f"The prompt has {len(prompt)} tokens; it must have at least 1 and at most "
                f"{self._max_model_len - room} with max_model_len={self._max_model_len}.",
                parameter="prompt",
            )
        table = self._kv_cache.make_table(
            list(prompt),
            cache_salt=request.cache_salt,
            position_key=request.position_key,
            sibling_group=request.sibling_group,
            adapter_keys=() if request.lora_request is None else request.lora_request.cache_keys,
        )
        order = (request.priority if self._config.policy == "priority" else 0, self._num_added)
        self._num_added += 1
        new = Request(request, table, order, self._max_model_len)
        self._requests[new.request_id] = new
        self._num_prompt_logprobs += new.prompt_logprobs is not None
        if request.sampling_params.structured_outputs is None:
            self._waiting.push(new)
        else:
            new.status = RequestStatus.WAITING_FOR_GRAMMAR
            self._blocked_requests.add(new)

    def is_waiting_for_grammar(self, request_id: str) -> bool:
        """Whether the request cannot begin before `start_grammar`."""
        request = self._requests.get(request_id)
        return request is not None and request.status is RequestStatus.WAITING_FOR_GRAMMAR

    def start_grammar(self, request_id: str, grammar: Grammar) -> None:
        """Lets a request begin that waits for its grammar. Unknown ids are ignored: it was aborted meanwhile."""
        request = self._requests.get(request_id)
        if request is not None:
            assert request.status is RequestStatus.WAITING_FOR_GRAMMAR
            request.grammar = grammar
            self._num_grammars += 1
            self._blocked_requests.remove(request)
            request.status = RequestStatus.WAITING
            self._waiting.push(request)

    def fail_request(
        self, request_id: str, message: str, parameter: str | None = None, grammar: Grammar | None = None
    ) -> None:
        """Ends a request in whatever state it is, with an error; the next results bring it. Unknown ids are ignored.

        Args:
            parameter: The request's setting that is at fault, if one is.
            grammar: Only if the request has this one: another with the same id may have come meanwhile.
        """
        request = self._requests.get(request_id)
        if request is not None and (grammar is None or request.grammar is grammar):
            self._remove_from_queue(request)
            output = final_output(request, FinishReason.ERROR, None, message)
            output.error_parameter = parameter
            self._pending_outputs.append(output)
            self._release(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Ends requests in whatever state they are, without an output. Unknown ids are ignored."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._remove_from_queue(request)
                self._release(request)

    def pop_outputs(self) -> list[EngineCoreOutput]:
        """What the next results would bring beside their own: outputs of requests that have ended without a step."""
        outputs, self._pending_outputs = self._pending_outputs, []
        return outputs

    @property
    def running_lora_ids(self) -> set[int]:
        """The adapters of the requests that run."""
        return {request.lora_int_id for request in self._running if request.lora_int_id}

    def masks_for(self, plan: SchedulerOutput) -> tuple[list[int], bytes]:
        """The masks of a plan that said `masks_follow`, as `mask_rows` and `token_masks`.

        To be called when the results of all plans before it have been taken in, and no plan was made since.
        """
        return masks_of_batch(self._batches[plan.step])

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False, with nothing changed, while requests hold blocks."""
        return self._kv_cache.reset_prefix_cache()

    def make_stats(self) -> SchedulerStats:
        """Gauges as of now, counters since start."""
        stats = self._stats
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=self.num_waiting,
            kv_cache_usage=self._kv_cache.usage,
            num_preemptions=stats.num_preemptions,
            prefix_cache_queries=stats.prefix_cache_queries,
            prefix_cache_hits=stats.prefix_cache_hits,
            num_drafts=stats.num_drafts,
            num_draft_tokens=stats.num_draft_tokens,
            accepted_at=stats.accepted_at.copy(),
            num_prompt_tokens=stats.num_prompt_tokens,
            num_generated_tokens=stats.num_generated_tokens,
            num_waiting_tokens=self._num_waiting_tokens(),
        )

    def _num_waiting_tokens(self) -> int:
        """Of who waits, and of who runs and has a part of the prompt left: those came last."""
        count = self._waiting.num_tokens
        for request in reversed(self._running):
            left = request.num_prompt_tokens - request.num_computed_tokens
            if left <= 0:
                break
            count += left
        return count

    # ------------------------------------------------------------------------------------------------------ schedule

    def schedule(self) -> SchedulerOutput:
        """Plans the next step: who runs catches up, then who waits joins, as far as budget, rows and blocks go."""
        plan, batch = self._plan()
        return self._commit_plan(plan, batch)

    def schedule_unless_empty(self) -> SchedulerOutput | None:
        """Plans the next step if anybody can compute in it.

        Otherwise there is no such step: the rows freed meanwhile are named by the next plan, and the next results bring
        the outputs that are due. Only while some results are still to come.
        """
        plan, batch = self._plan()
        return self._commit_plan(plan, batch) if batch else None

    def _plan(self) -> tuple[SchedulerOutput, list[Request]]:
        """Decides who computes what, and in which blocks. Also returns the requests, parallel to the plan's rows."""
        plan = SchedulerOutput(step=self._next_step)
        batch: list[Request] = []
        num_preemptions = self._stats.num_preemptions

        long_prefills = self._long_prefill_limiter
        if long_prefills.were_limited:
            long_prefills.start_step()
        budget = self._schedule_running(plan, batch, self._config.max_num_batched_tokens)
        can_admit = num_preemptions == self._stats.num_preemptions  # no request takes the place of a preempted one
        if can_admit and self._waiting:
            budget = self._schedule_waiting(plan, batch, budget)
        if budget and long_prefills.were_limited:
            budget = self._schedule_held_back(plan, batch, budget)
            if budget and can_admit and self._waiting:
                long_prefills.disable_limit()
                self._schedule_waiting(plan, batch, budget)
        assert batch or not plan.new_block_rows, "blocks were planned for a row that does not compute"
        return plan, batch

    def _commit_plan(self, plan: SchedulerOutput, batch: list[Request]) -> SchedulerOutput:
        """Completes a plan that will be executed."""
        plan.freed_rows = self._rows.pop_freed()
        if self._unconfirmed.writers:
            self._unconfirmed.end_plan(plan.step)
        plan.total_num_scheduled_tokens = sum(plan.num_scheduled_tokens)
        if self._num_grammars:
            add_masks(plan, batch)
        self._next_step += 1
        self._batches[plan.step] = batch
        if self._num_prompt_logprobs:
            self._prompt_starts[plan.step] = {
                i: request.num_computed_tokens - plan.num_scheduled_tokens[i]
                for i, request in enumerate(batch)
                if request.prompt_logprobs is not None
            }
        return plan

    def _schedule_running(self, plan: SchedulerOutput, batch: list[Request], budget: int) -> int:
        """Lets running requests catch up. Returns what is left of the budget."""
        rows, num_scheduled = plan.rows, plan.num_scheduled_tokens
        in_pipeline = self._num_stages > 1
        samples_left = -(-len(self._running) // self._num_stages)
        self._deferred_masks.start_plan()
        for request in self._running:  # which gets shorter at its end, behind `request`, if others must give way
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
                continue  # what may come next depends on a token in flight, or is being computed
            if num_new > 1:
                share = self._long_prefill_limiter.num_allowed_tokens(num_new)
                if share < num_new:
                    self._long_prefill_limiter.held_back.append((request, len(batch) if share else -1))
                    if not share:
                        continue
                num_new = min(share, budget)
            end = num_computed + num_new
            drafts = request.draft_token_ids
            if drafts:
                drafts = self._take_draft_tokens(request, budget - num_new - (len(self._running) - len(batch) - 1))
            # A request that generates needs a look at its blocks only where it enters a new one. Where tokens are
            # guessed there are blocks ahead, and the look is for names. A prompt whose share is one token may get the
            # rest of the budget below, for which it needs blocks now.
            if num_tokens - num_computed > 1 or end > request.table.num_slots or self._is_speculative:
                if not self._allocate_slots(request, end, drafts, plan):
                    break
            request.num_computed_tokens = end
            if end == num_tokens:
                request.num_tokens = end + 1  # the one this step samples
                samples_left -= 1
            if drafts:
                plan.draft_token_ids[len(batch)] = drafts
                num_new += len(drafts)
            rows.append(request.row)
            num_scheduled.append(num_new)
            batch.append(request)
            budget -= num_new
        return budget

    def _schedule_held_back(self, plan: SchedulerOutput, batch: list[Request], budget: int) -> int:
        """Gives running requests the rest of the budget, in order and without preemption. Returns what is left then."""
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
                request.num_tokens = end + 1  # the one this step samples
            budget -= num_new
            if not budget:
                break
        return budget

    def _schedule_waiting(self, plan: SchedulerOutput, batch: list[Request], budget: int) -> int:
        """Lets waiting requests join, in order, until one does not fit. Returns what is left of the budget.

        Who waits for a slot, or has a long prompt while others' are computed, is passed over.
        """
        waiting, kv_cache, turns, long_prefills = (
            self._waiting,
            self._kv_cache,
            self._lora_admission,
            self._long_prefill_limiter,
        )
        if turns.max_loras and waiting:
            turns.start_round(request.lora_int_id for request in self._running)
        passed_over: list[Request] = []
        while waiting and budget and self._rows.num_free:
            request = waiting.peek()
            if request.lora_int_id and not turns.can_admit(request):
                if len(passed_over) == _MAX_PASSED_OVER:
                    break
                passed_over.append(waiting.pop())
                continue
            if request.awaits_mask:  # it has given way, and goes on when its mask is there
                passed_over.append(waiting.pop())
                continue
            if request.is_long and not long_prefills.has_room:
                if len(passed_over) == _MAX_PASSED_OVER:
                    break
                passed_over.append(waiting.pop())
                continue
            table, num_tokens = request.table, request.num_tokens
            computed_blocks = [] if request.needs_every_position else kv_cache.get_computed_blocks(table)
            num_computed = len(computed_blocks) // self._num_groups * kv_cache.block_size
            num_new = num_tokens - num_computed
            if num_new > budget and not self._config.enable_chunked_prefill:
                break
            share = long_prefills.num_allowed_tokens(num_new)
            request.is_long = not share
            if request.is_long:
                continue
            is_held_back, num_new = share < num_new, min(share, budget)
            # It gets all blocks for what it has at once, however it is chunked, and leaves one for each that runs:
            # who joins only to be preempted in the next step has computed for nothing.
            num_spare = len(self._running) * self._num_groups
            new_blocks = kv_cache.allocate_slots(table, num_tokens, computed_blocks, num_spare=num_spare)
            if new_blocks is None:
                if self._running:
                    break
                waiting.pop()
                self._fail_cache_too_small(request)
                continue
            waiting.pop()
            if request.lora_int_id:
                turns.record_admission(request)
            self._admit(request, num_computed, num_new, plan)
            if is_held_back:
                long_prefills.held_back.append((request, len(batch)))
            batch.append(request)
            budget -= num_new
        for request in passed_over:
            waiting.push(request)
        return budget

    def _admit(self, request: Request, num_computed: int, num_new: int, plan: SchedulerOutput) -> None:
        """Moves a request that has its blocks from waiting to running, and plans its first tokens."""
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_computed
            request.scheduled_time = self._clock()
            self._stats.num_prompt_tokens += request.num_prompt_tokens
            if not request.needs_every_position and request.table.root is not None:
                self._stats.prefix_cache_queries += request.num_tokens
                self._stats.prefix_cache_hits += num_computed
        request.status = RequestStatus.RUNNING
        request.row = self._rows.allocate()
        insort(self._running, request)

        end = num_computed + num_new
        self._kv_cache.cache_blocks(request.table, end)
        request.num_computed_tokens = end
        plan.new_requests.append(new_request_data(request, num_computed))
        plan.rows.append(request.row)
        plan.num_scheduled_tokens.append(num_new)
        if end == request.num_tokens:
            request.num_tokens = end + 1  # the one this step samples

    def _take_draft_tokens(self, request: Request, budget: int) -> list[int]:
        """The guesses at a running request's next tokens, as far as there is room; they count only once."""
        drafts, request.draft_token_ids = request.draft_token_ids, []
        if request.grammar is not None or request.num_computed_tokens + 1 < request.num_tokens:
            return []
        # The last token that it may have is sampled behind the last guess.
        return drafts[: max(0, min(budget, request.max_num_tokens - request.num_tokens - 1))]

    def _allocate_slots(self, request: Request, num_tokens: int, drafts: list[int], plan: SchedulerOutput) -> bool:
        """Gives a running request blocks for its first `num_tokens` tokens, at the cost of those behind it.

        Nobody gives way for guesses: where there is no room for `drafts`, and for making more, these are dropped.

        Returns:
            False if it cannot compute in this step: it gave way itself, or ended, or waits for a token in flight.
        """
        kv_cache, table, num_computed = self._kv_cache, request.table, request.num_computed_tokens
        lengths: list[int] = [] if self._num_groups == 1 else [len(blocks.block_ids) for blocks in table.groups]
        new_blocks = None
        if drafts or self._num_lookahead:
            wanted = min(request.num_tokens + len(drafts) + self._num_lookahead, request.max_num_tokens)
            spare = len(self._running)
            new_blocks = kv_cache.allocate_slots(table, wanted, num_spare=spare, num_computed_tokens=num_computed)
            if new_blocks is None:
                drafts.clear()
        if new_blocks is None:
            new_blocks = kv_cache.allocate_slots(table, request.num_tokens, num_computed_tokens=num_computed)
        while new_blocks is None:
            last = self._running[-1]
            if last is request and len(self._running) == 1:
                # Nobody is left to give way. Unless a token in flight turns out to be its last, this is its end.
                if not request.has_token_in_flight:
                    self._running.clear()
                    self._fail_cache_too_small(request)
                return False
            self._preempt(last)
            if last is request:
                return False
            new_blocks = kv_cache.allocate_slots(table, request.num_tokens, num_computed_tokens=num_computed)
        if new_blocks:
            self._add_blocks_to_plan(request, lengths, new_blocks, plan)
        kv_cache.cache_blocks(table, num_tokens)
        return True

    def _add_blocks_to_plan(
        self, request: Request, lengths: list[int], new_blocks: list[int], plan: SchedulerOutput
    ) -> None:
        """Puts the blocks into the plan that a running request was given.

        Args:
            lengths: Blocks that its table had before, by group; not read where there is one.
        """
        row = request.row
        if self._num_groups == 1:
            plan.new_block_rows.extend([row] * len(new_blocks))
        else:
            for blocks, length in zip(request.table.groups, lengths, strict=True):
                plan.new_block_rows.extend([row] * (len(blocks.block_ids) - length))
                row += self._config.max_num_seqs
        plan.new_block_ids.extend(new_blocks)

    def _preempt(self, request: Request) -> None:
        """Takes row and blocks from `request`, the last that runs; it will compute its tokens again."""
        self._running.pop()
        self._stats.num_preemptions += 1
        self._rows.free(request.row)
        self._kv_cache.free(request.table, request.num_computed_tokens)
        request.row = -1
        request.num_computed_tokens = 0
        request.draft_token_ids = []
        if request.has_token_in_flight:
            request.status = RequestStatus.WAITING_FOR_TOKEN
            self._blocked_requests.add(request)
        else:
            request.status = RequestStatus.WAITING
            self._waiting.push(request)

    # ------------------------------------------------------------------------------------------- update_from_output

    def update_from_output(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> EngineCoreOutputs:
        """Takes in the results of a plan and says what there is to tell.

        Raises:
            PlatformError: The results are not those of the plan.
        """
        batch = self._batches.pop(plan.step)
        starts = self._prompt_starts.pop(plan.step, {})
        tokens = output.sampled_token_ids
        if output.step != plan.step or len(tokens) != len(batch):
            raise PlatformError(
                f"The workers were given step {plan.step} with {len(batch)} rows and answered step {output.step} "
                f"with {len(tokens)} tokens."
            )
        outputs, self._pending_outputs = self._pending_outputs, []
        if output.errors:
            self._fail_rows(batch, output.errors, outputs)
        if self._unconfirmed.pending_plans:
            self._unconfirmed.confirm(plan.step)
        if output.logprobs or output.prompt_logprobs:
            collect_logprobs(batch, starts, output)
        if output.pooler_output:
            self._finish_pooled(batch, output.pooler_output, outputs)
        if plan.draft_token_ids:
            count_draft_tokens(self._stats, plan, output)
        self._append_tokens(batch, tokens, output.further_token_ids, outputs)
        for position, drafts in output.draft_token_ids.items():
            if batch[position].status is RequestStatus.RUNNING:
                batch[position].draft_token_ids = drafts
        return EngineCoreOutputs(outputs=outputs, stats=self.make_stats())

    def _append_tokens(
        self,
        batch: list[Request],
        tokens: list[int],
        further: dict[int, list[int]],
        outputs: list[EngineCoreOutput],
    ) -> None:
        """Gives each request its token, or tokens, and ends those that they end."""
        running, finished = RequestStatus.RUNNING, RequestStatus.FINISHED
        ended: list[Request] = []
        failed: list[tuple[str, str]] = []
        num_generated = 0
        for position, token in enumerate(tokens):
            request = batch[position]
            status = request.status
            if token < 0 or status is finished:
                continue
            token_ids, new, stop = request.token_ids, [token], None
            token_ids.append(token)
            grammar = request.grammar
            if grammar is not None or token in request.stop_ids or len(token_ids) >= request.max_num_tokens:
                stop = request.check_stop(token)
                if grammar is not None:
                    stop = request.advance_grammar(token, stop)
                    if stop is None and grammar.error is not None:
                        failed.append((request.request_id, grammar.error))
            if further and position in further:
                taken, stop = request.append_accepted(further[position], stop)
                new += taken
            num_generated += len(new)
            if stop is not None:
                ended.append(request)
                outputs.append(final_output(request, *stop, num_new_tokens=len(new)))
                continue
            if status is not running:
                self._unblock(request)
            if request.has_only_tokens:
                outputs.append(
                    EngineCoreOutput(
                        request.request_id, new, None, None, None, None,
                        request.num_cached_tokens, None, request.scheduled_time,
                    )
                )  # fmt: skip
            elif request.emits_each_step:
                outputs.append(make_output(request, new))
            elif not request.first_token_time:
                request.first_token_time = self._clock()
        self._stats.num_generated_tokens += num_generated
        if ended:
            self._finish(ended)
        for request_id, error in failed:  # with the next results, after the token that came before it
            self.fail_request(request_id, error, "structured_outputs")

    def _finish_pooled(self, batch: list[Request], vectors: dict[int, bytes], outputs: list[EngineCoreOutput]) -> None:
        """Ends the requests whose vectors have come."""
        finished = []
        for position, vector in vectors.items():
            request = batch[position]
            if request.status is not RequestStatus.FINISHED:
                output = make_output(request, [], FinishReason.STOP)
                output.pooling_output = vector
                outputs.append(output)
                finished.append(request)
        self._finish(finished)

    def _fail_rows(self, batch: list[Request], errors: dict[int, str], outputs: list[EngineCoreOutput]) -> None:
        """Ends the requests whose row failed. Nothing that they computed or shared is found again, and those that have
        read what they should have written start again.
        """
        failed, tables = [], []
        for position, message in errors.items():
            request = batch[position]
            if request is RESTARTED:
                continue  # it had read what was not there
            setting = request.data.sampling_params.narrowed_by if message == NOTHING_TO_SAMPLE else None
            if setting is None:  # else its keys and values are as good as any
                tables.append(request.table)  # also if it has ended meanwhile
            if request.status is not RequestStatus.FINISHED:
                ended = final_output(request, FinishReason.ERROR, None, message)
                ended.error_parameter = setting
                outputs.append(ended)
                failed.append(request)
        if dependents := self._kv_cache.discard(tables):
            self._restart(set(dependents), [batch, *self._batches.values()])
        self._finish(failed)

    def _restart(self, tables: set[BlockTable], batches: Iterable[list[Request]]) -> None:
        """Lets the requests of these tables, which hold no blocks any more, compute all their tokens again.

        Args:
            batches: Those whose results are not taken in yet. What they have for these requests is dropped.
        """
        affected: dict[Request, None] = {}  # in an order that other ranks find, too
        for batch in batches:
            for position, request in enumerate(batch):
                if request.table in tables:
                    affected[request] = None
                    batch[position] = RESTARTED
        for request in affected:
            if request.status is RequestStatus.FINISHED:
                continue
            request.num_tokens = len(request.token_ids)  # none is in flight
            request.draft_token_ids = []
            if request.status is RequestStatus.RUNNING:
                self._running.remove(request)
                self._rows.free(request.row)
                request.row = -1
                request.num_computed_tokens = 0
                request.status = RequestStatus.WAITING
                self._waiting.push(request)
            else:
                self._unblock(request)

    def _fail_cache_too_small(self, request: Request) -> None:
        """Ends a request that has the whole cache to itself and does not fit. It is in no list any more."""
        kv_cache = self._kv_cache
        message = cache_too_small_message(
            request.num_tokens, kv_cache.blocks_for(request.num_tokens), kv_cache.block_size, kv_cache.num_blocks
        )
        self._pending_outputs.append(final_output(request, FinishReason.ERROR, None, message))
        self._release(request)

    def _unblock(self, request: Request) -> None:
        """Puts a preempted request back in the queue once all its tokens are known."""
        if request.status is RequestStatus.WAITING_FOR_TOKEN and not request.has_token_in_flight:
            self._blocked_requests.remove(request)
            request.status = RequestStatus.WAITING
            self._waiting.push(request)

    # ----------------------------------------------------------------------------------------------------- the end

    def _finish(self, requests: list[Request]) -> None:
        """Ends requests whose last output is made."""
        for request in requests:
            if request.status is not RequestStatus.RUNNING:
                self._remove_from_queue(request)
            self._release(request)
        # All at once: taking them out one by one is quadratic.
        self._running = [request for request in self._running if request.status is RequestStatus.RUNNING]

    def _remove_from_queue(self, request: Request) -> None:
        """Takes a request out of the list that its status says."""
        match request.status:
            case RequestStatus.RUNNING:
                self._running.remove(request)
            case RequestStatus.WAITING:
                self._waiting.remove(request)
            case _:
                self._blocked_requests.remove(request)

    def _release(self, request: Request) -> None:
        """Gives back all that a request holds, which is in no list any more."""
        if request.row >= 0:
            self._rows.free(request.row)
            request.row = -1
        self._kv_cache.free(request.table, request.num_computed_tokens)
        self._num_prompt_logprobs -= request.data.sampling_params.prompt_logprobs is not None
        self._num_grammars -= request.grammar is not None
        request.grammar = None
        request.status = RequestStatus.FINISHED
        del self._requests[request.request_id]

    def check_integrity(self) -> None:
        """Raises AssertionError unless every request is where its status says and holds what it should."""
        self._kv_cache.check_integrity()
        self._rows.check_integrity([request.row for request in self._running])
        check_requests(
            self._requests.values(),
            running=self._running,
            waiting=list(self._waiting),
            blocked=list(self._blocked_requests),
            num_used_blocks=self._kv_cache.num_blocks - self._kv_cache.num_free_blocks,
        )
        assert self._num_grammars == sum(request.grammar is not None for request in self._requests.values())

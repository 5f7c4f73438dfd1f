"""Owner of all requests of an engine core: plans steps for them and turns the results of steps into outputs.

- Service order is one sort key. Requests wait and run in that order, so the request to preempt when blocks run out is
  always the last running one.
- `schedule` counts planned work as done: planned tokens as computed, a sample as a token whose value is unknown (in
  flight). So the next step can be planned before the results of this one are back. Results for a request that has ended
  meanwhile are dropped. When a request fails, requests that were planned to read what it should have written start
  again, and the results of their steps in flight are dropped too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import msgspec

from mvllm.config.engine_config import SchedulerConfig
from mvllm.config.setting_combinations import check_scheduler_config
from mvllm.errors import PlatformError, RequestError
from mvllm.kv_cache.block_table import BlockTable
from mvllm.kv_cache.kv_cache_manager import KVCacheManager
from mvllm.kv_transfer.connectors import KVConnectors
from mvllm.messages.lora import LoRARequest
from mvllm.messages.requests import (
    NOTHING_TO_SAMPLE,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    SchedulerStats,
)
from mvllm.messages.scheduler_output import ModelRunnerOutput, SchedulerOutput
from mvllm.scheduler.draft_length import DraftLength
from mvllm.scheduler.encoder_planner import EncoderPlanner, check_items, num_skipped_positions
from mvllm.scheduler.grammar_masks import masks_of_batch
from mvllm.scheduler.kv_loads import KVLoads
from mvllm.scheduler.request import RESTARTED, Grammar, Request, RequestStatus
from mvllm.scheduler.request_lists import RequestLists
from mvllm.scheduler.request_outputs import collect_logprobs, count_draft_tokens, final_output, make_output
from mvllm.scheduler.request_pairs import (
    add_companion,
    check_pair,
    companion_data,
    num_companion_tokens,
    pairs_sampled_apart,
)
from mvllm.scheduler.step import Step
from mvllm.scheduler.step_planner import StepPlanner
from mvllm.scheduler.step_time_model import StepTimeModel
from mvllm.scheduler.swapping import AUTO, NO_COSTS, RECOMPUTE, CopyCosts, Swapper


class Scheduler:
    """Owner of all requests from `add_request` to their last output. Used from one thread.

    Every plan must be executed, in order, and followed by its `update_from_output`, also an empty plan. Results may lag
    behind by any number of plans.

    Args:
        config: Limits and policy.
        max_model_len: Longest sequence, prompt and output together, in tokens.
        kv_cache: Allocates KV blocks; the scheduler is its only user.
        clock: Seconds, monotonic.
        num_stages: Pipeline stages that execute the plans. With more than one, a request is part of one step at a time
            (its next plan waits for its token), and decoding requests are spread over as many steps.
        max_loras: Most different LoRA adapters among the running requests.
        num_speculative_tokens: Most draft tokens of a request in one step.
        workers_keep_drafts: Workers keep the draft tokens that they propose, so that plans may have placeholders of
            them, see SchedulerOutput. Otherwise, with more than one pipeline stage, and in models with sequence states,
            a request with draft tokens is part of one step at a time.
        num_lookahead_tokens: Slots behind a sequence's last token that a proposer can use.
        can_defer_masks: Plans may say `masks_follow`. The caller then asks for `masks_for` when it has passed the
            results of the previous plan to `update_from_output`.
        connectors: Stores of blocks outside of the engine; None without any. They need a KV cache with a host tier.
        encoders: Plans the encoders of images, audio and embeddings; None refuses requests that have some.
        preemption_mode: `auto`, `swap` or `recompute`, see `swapping.py`. Without a host tier always `recompute`.
        copy_costs: Measured costs of copies to and from host memory.
        adapter_hash: Returns the hash of a LoRA adapter's files, equal in all engines; None if it is not known.
        first_step: The number of the first plan, if the caller has executed plans of its own.
        adapts_drafts: The number of draft tokens follows measured times, see `draft_length.py`. Otherwise it is always
            `num_speculative_tokens`.

    Raises:
        ConfigError: The limits contradict each other.

    Attributes:
        requests: The unfinished requests.
        kv_loads: Requests that wait for connectors; None without a host tier.
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
        workers_keep_drafts: bool = False,
        can_defer_masks: bool = False,
        connectors: KVConnectors | None = None,
        encoders: EncoderPlanner | None = None,
        preemption_mode: str = RECOMPUTE,
        copy_costs: CopyCosts = NO_COSTS,
        adapter_hash: Callable[[LoRARequest], str | None] | None = None,
        first_step: int = 0,
        adapts_drafts: bool = False,
    ) -> None:
        check_scheduler_config(config, max_model_len)
        self._config = config
        self._max_model_len = max_model_len
        self._kv_cache = kv_cache
        self._unconfirmed = kv_cache.unconfirmed
        self._clock = clock
        self._stats = SchedulerStats(accepted_at=[0] * num_speculative_tokens, drafted_at=[0] * num_speculative_tokens)
        self.requests = RequestLists(kv_cache, config.max_num_seqs, encoders)
        self._encoders = encoders
        self._adapter_hash = adapter_hash
        self._draft_length = DraftLength(num_speculative_tokens) if num_speculative_tokens and adapts_drafts else None
        self.kv_loads = self._make_kv_loads(connectors, copy_costs)
        swaps = self.kv_loads is not None and preemption_mode != RECOMPUTE
        times_swaps = swaps and preemption_mode == AUTO
        self._step_times = StepTimeModel() if config.long_prefill_slowdown or times_swaps else None
        swapper = Swapper(preemption_mode, kv_cache, copy_costs, self._step_times) if swaps else None
        plans_ahead = workers_keep_drafts and num_stages == 1
        self._planner = StepPlanner(
            config,
            self.requests,
            kv_cache,
            self._stats,
            clock,
            num_stages=num_stages,
            max_loras=max_loras,
            is_speculative=num_speculative_tokens > 0,
            num_placeholders=num_speculative_tokens if plans_ahead else 0,
            num_lookahead_tokens=num_lookahead_tokens,
            can_defer_masks=can_defer_masks,
            step_times=self._step_times if config.long_prefill_slowdown else None,
            kv_loads=self.kv_loads,
            swapper=swapper,
            encoders=encoders,
        )
        self._batches: dict[int, list[Request]] = {}  # step in flight -> its requests, by position in the batch
        self._prompt_starts: dict[int, dict[int, int]] = {}  # step -> position in batch -> first position computed
        self._next_step = first_step
        self._num_added = 0

    def _make_kv_loads(self, connectors: KVConnectors | None, copy_costs: CopyCosts) -> KVLoads | None:
        if self._kv_cache.tier is None:
            return None
        return KVLoads(
            self._kv_cache,
            self.requests,
            connectors or KVConnectors({}),
            self._clock,
            block_bytes=copy_costs.block_bytes,
            state_bytes=copy_costs.state_bytes,
        )

    # ---------------------------------------------------------------------------------------------------- requests

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return len(self.requests.running)

    @property
    def num_waiting(self) -> int:
        """Requests that have none."""
        return len(self.requests.waiting) + len(self.requests.blocked)

    @property
    def next_step(self) -> int:
        """The number of the next plan."""
        return self._next_step

    @property
    def request_ids(self) -> list[str]:
        """Ids of all unfinished requests."""
        return list(self.requests.by_id)

    def has_requests(self) -> bool:
        """Whether a request is unfinished, or its final output has not been returned yet."""
        return bool(self.requests.by_id or self.requests.pending_outputs)

    @property
    def is_waiting_for_masks(self) -> bool:
        """Whether every request waits for a grammar or for a mask. Valid while no step is in flight."""
        requests = self.requests
        if requests.pending_outputs or not (requests.blocked or requests.num_grammars):
            return False
        return all(request.awaits_mask for some in (requests.running, requests.waiting) for request in some)

    @property
    def is_waiting_for_kv(self) -> bool:
        """Whether every request waits for a KV connector. Valid while no step is in flight."""
        requests, loads = self.requests, self.kv_loads
        if loads is None or not loads.num_waiting or requests.pending_outputs:
            return False
        return len(requests.by_id) == loads.num_waiting

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queues a request. With `structured_outputs` it is blocked until `start_grammar` or `fail_request`.

        Raises:
            RequestError: The id is in use, or the prompt is empty or leaves no room for a token.
        """
        prompt = request.prompt_token_ids
        if request.request_id in self.requests.by_id:
            raise RequestError(f"Request id {request.request_id!r} is in use.", parameter="request_id")
        longest = self._max_model_len - (request.pooling_params is None)  # a generated token needs a position
        if not 0 < len(prompt) <= longest:
            raise RequestError(
                f"The prompt has {len(prompt)} tokens; it must have at least 1 and at most {longest} with "
                f"max_model_len={self._max_model_len}.",
                parameter="prompt",
            )
        if request.pair is not None:
            check_pair(request, self._config, self._max_model_len)
        if request.items:
            check_items(self._encoders, request)
        order = (request.priority if self._config.policy == "priority" else 0, self._num_added)
        self._num_added += 1
        longest = self._max_model_len - num_skipped_positions(request)
        added = Request(request, self._make_table(request), order, longest)
        if request.pair is not None:
            data = companion_data(request)
            add_companion(added, data, self._make_table(data), self._max_model_len)
        self.requests.add(added)
        if self.kv_loads is not None:
            self.kv_loads.add(added)

    def _make_table(self, request: EngineCoreRequest) -> BlockTable:
        adapter, hash_of = request.lora_request, self._adapter_hash
        return self._kv_cache.make_table(
            list(request.prompt_token_ids),
            cache_salt=request.cache_salt,
            position_key=request.position_key,
            sibling_group=request.sibling_group,
            adapter_keys=() if adapter is None else adapter.cache_keys,
            adapter_hash=None if adapter is None or hash_of is None else hash_of(adapter),
            items=[item.span for item in request.items] if request.items else (),
        )

    def is_waiting_for_grammar(self, request_id: str) -> bool:
        """Whether the request is blocked until `start_grammar`."""
        request = self.requests.by_id.get(request_id)
        return request is not None and request.status is RequestStatus.WAITING_FOR_GRAMMAR

    def start_grammar(self, request_id: str, grammar: Grammar) -> None:
        """Unblocks a request that waits for its grammar. Unknown ids are ignored: the request was aborted."""
        request = self.requests.by_id.get(request_id)
        if request is not None:
            self.requests.start_grammar(request, grammar)

    def fail_request(
        self, request_id: str, message: str, parameter: str | None = None, grammar: Grammar | None = None
    ) -> None:
        """Ends a request in any state with an error, which the next results contain. Unknown ids are ignored.

        Args:
            parameter: The request's parameter that caused the error, if one did.
            grammar: Fail the request only if it has this grammar: its id may have been used again.
        """
        request = self.requests.by_id.get(request_id)
        if request is not None and (grammar is None or request.grammar is grammar):
            self.requests.fail(request, message, parameter)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Ends requests in any state without an output. Unknown ids are ignored."""
        for request_id in request_ids:
            request = self.requests.by_id.get(request_id)
            if request is not None:
                self.requests.drop(request)

    def finish_aborted(self) -> None:
        """Ends all requests with the outputs so far, and the finish reason ABORT. The next results contain them."""
        for request in list(self.requests.by_id.values()):
            self.requests.pending_outputs.append(final_output(request, FinishReason.ABORT, num_new_tokens=0))
            self.requests.drop(request)

    def close_weight_version(self, version: int) -> None:
        """Records that all tokens so far were sampled with this version of the weights. While no step is in flight."""
        for request in self.requests.by_id.values():
            request.close_weight_version(version)

    def forget_computed(self, *, restart: bool) -> None:
        """Drops the prefix cache, because the weights change. While no step is in flight.

        Args:
            restart: Running requests compute all their tokens again. Otherwise they keep their blocks, which are not
                shared with other requests any more.
        """
        assert not self._batches, "a step is in flight"
        restart |= self._encoders is not None and self._encoders.has_cross_attention  # every step reads the results
        while restart and self.requests.running:
            self.requests.preempt_last()
        self._kv_cache.forget_computed()
        self._renew_tables()
        if self._encoders is not None:
            self._encoders.clear()

    def _renew_tables(self) -> None:
        """Gives waiting requests a new root of their hashes, after the KV cache has chosen another."""
        if self.kv_loads is None:
            return
        self.kv_loads.cancel()
        for request in self.requests.by_id.values():
            if request.status is not RequestStatus.RUNNING:
                self.requests.drop_swapped(request)
                for side in request.sides:
                    if side.table.root is not None:
                        self._kv_cache.renew_table(side.table, self._make_table(side.data))

    def restore_root(self) -> None:
        """The weights are those of the start again. While there are no requests."""
        self._kv_cache.restore_root()
        if self.kv_loads is not None:
            self.kv_loads.record_changes(restart=True)

    def pop_outputs(self) -> list[EngineCoreOutput]:
        """Final outputs of requests that ended outside of a step. They are no longer part of the next results."""
        outputs, self.requests.pending_outputs = self.requests.pending_outputs, []
        return outputs

    @property
    def running_lora_ids(self) -> set[int]:
        """LoRA adapters of the running requests."""
        return {request.lora_int_id for request in self.requests.running if request.lora_int_id}

    def masks_for(self, plan: SchedulerOutput) -> tuple[list[int], bytes]:
        """`mask_rows` and `token_masks` of a plan that said `masks_follow`. Call it after `update_from_output` of all
        earlier plans, and before the next plan is made."""
        return masks_of_batch(self._batches[plan.step])

    def reset_prefix_cache(self, *, keeps_tiers: bool = False) -> bool:
        """Evicts all cached prefixes and encoder results. Does nothing and returns False while requests hold blocks.

        Args:
            keeps_tiers: Only the device loses its contents. Otherwise nothing is found that connectors have stored.
        """
        is_reset = self._kv_cache.reset_prefix_cache(keeps_tiers=keeps_tiers)
        if is_reset and not keeps_tiers:
            self._renew_tables()
        if is_reset and self._encoders is not None:
            self._encoders.clear()
        return is_reset

    def reset_encoder_cache(self) -> bool:
        """Drops encoder results that no running request uses. Returns whether none is left."""
        return self._encoders is None or self._encoders.drop_unused()

    def make_stats(self) -> SchedulerStats:
        """Gauges as of now, counters since start."""
        stats, requests, loads = self._stats, self.requests, self.kv_loads
        made: SchedulerStats = msgspec.structs.replace(
            stats,
            num_running=len(requests.running),
            num_waiting=len(requests.waiting) + len(requests.blocked),
            kv_cache_usage=self._kv_cache.usage,
            accepted_at=stats.accepted_at.copy(),
            drafted_at=stats.drafted_at.copy(),
            num_waiting_tokens=requests.num_waiting_tokens(),
            num_swapped=requests.num_swapped,
        )
        if loads is not None:
            made.num_waiting_for_kv, made.kv_tiers = loads.num_waiting, loads.stats()
        if self._encoders is not None:
            self._encoders.add_stats(made)
        return made

    # ---------------------------------------------------------------------------------------------------- schedule

    def schedule(self) -> SchedulerOutput:
        """Plans the next step."""
        return self._commit_plan(self._planner.plan(self._next_step))

    def schedule_unless_empty(self) -> SchedulerOutput | None:
        """Plans the next step if a request can compute in it. Only while a step is in flight.

        Otherwise there is no such step: the next plan names the rows freed meanwhile, and the results of the step in
        flight contain the pending outputs.
        """
        step = self._planner.plan(self._next_step)
        return self._commit_plan(step) if step.batch else None

    def _commit_plan(self, step: Step) -> SchedulerOutput:
        """Completes a plan that will be executed."""
        plan, batch, requests = step.plan, step.batch, self.requests
        plan.freed_rows = requests.rows.pop_freed()
        if self._unconfirmed.writers:
            self._unconfirmed.end_plan(plan.step)
        if self._kv_cache.tier is not None:
            self._kv_cache.tier.end_plan(plan)
        if self._encoders is not None:
            plan.freed_encoder_outputs = self._encoders.pop_freed()
        if requests.num_grammars and not plan.masks_follow:
            plan.mask_rows, plan.token_masks = masks_of_batch(batch, step.draft_masks)
        self._next_step += 1
        self._batches[plan.step] = batch
        if self._step_times is not None:
            self._step_times.start_step(plan.step, self._clock(), is_ordinary=self._planner.is_ordinary(step))
        if self._draft_length is not None:
            plan.max_draft_tokens = self._draft_length.start_step(plan, self._clock())
            self._planner.limit_placeholders(plan.max_draft_tokens)
        if requests.num_prompt_logprobs:
            self._prompt_starts[plan.step] = {
                i: request.num_computed_tokens - plan.num_scheduled_tokens[i]
                for i, request in enumerate(batch)
                if request.prompt_logprobs is not None
            }
        return plan

    # ------------------------------------------------------------------------------------------ update_from_output

    def update_from_output(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> EngineCoreOutputs:
        """Applies the results of a plan to its requests, and returns their outputs.

        Raises:
            PlatformError: The results are not those of the plan.
        """
        batch = self._batches.pop(plan.step)
        starts = self._prompt_starts.pop(plan.step, {})
        tokens = output.sampled_token_ids
        if output.step != plan.step or len(tokens) != len(batch):
            raise _wrong_results(plan, output, len(batch))
        if self._step_times is not None:
            self._step_times.end_step(plan, self._clock())
        if self._draft_length is not None:
            self._draft_length.end_step(plan, output, self._clock())
        outputs = self.pop_outputs()
        if output.errors:
            self._fail_rows(batch, output.errors, outputs)
        if self._encoders is not None:
            self._encoders.end_step(plan, output)
        if self._unconfirmed.pending_plans:
            self._kv_cache.confirm(plan.step)
        if self.kv_loads is not None:
            self.kv_loads.end_step(plan.step)
        if output.logprobs or output.prompt_logprobs:
            collect_logprobs(batch, starts, output)
        if output.pooler_output:
            self._finish_pooled(batch, output.pooler_output, outputs)
        has_pairs = self.requests.num_pairs > 0
        if has_pairs:
            self._fail_pairs_sampled_apart(batch, tokens)
        ended, failed = self._append_tokens(batch, tokens, output.further_token_ids, outputs)
        if has_pairs:
            self._stats.num_generated_tokens -= num_companion_tokens(batch, tokens)
        if ended or failed:
            self._end(ended, failed)
        if plan.draft_token_ids:
            self._apply_draft_results(plan, batch, output)
            self._end_drafts(plan, batch)
        if output.draft_token_ids:
            self._store_drafts(batch, output.draft_token_ids)
        for position in output.undrafted:
            batch[position].takes_drafts = False
        if self.kv_loads is not None:
            self.kv_loads.add_params(outputs)
        return EngineCoreOutputs(outputs=outputs, stats=self.make_stats())

    def _append_tokens(
        self,
        batch: list[Request],
        tokens: list[int],
        accepted: dict[int, list[int]],
        outputs: list[EngineCoreOutput],
    ) -> tuple[list[Request], list[Request]]:
        """Appends the sampled tokens to their requests, and adds their outputs.

        Args:
            accepted: Draft tokens accepted behind the sampled token, by position in the batch.

        Returns:
            The requests that end with their tokens, and those whose grammars have failed.
        """
        running, finished = RequestStatus.RUNNING, RequestStatus.FINISHED
        ended: list[Request] = []
        failed: list[Request] = []
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
                stop = request.advance(token)
            if accepted and position in accepted:
                appended, stop = request.append_accepted(accepted[position], stop)
                new += appended
            num_generated += len(new)
            if stop is not None:
                ended.append(request)
                outputs.append(final_output(request, *stop, num_new_tokens=len(new)))
                continue
            if status is not running or grammar is not None:
                self._continue(request, failed)
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
        return ended, failed

    def _continue(self, request: Request, failed: list[Request]) -> None:
        """Lets a request go on that was preempted, or has a grammar, unless that has failed."""
        self.requests.unblock(request)
        if request.grammar is not None and request.grammar.error is not None:
            failed.append(request)

    def _end(self, ended: list[Request], failed: list[Request]) -> None:
        """Ends the requests whose last output exists, and those whose grammars have failed."""
        errors = [(request.request_id, request.grammar.error or "") for request in failed if request.grammar]
        if ended:
            self.requests.finish(ended)
        for request_id, error in errors:  # in the next results, behind the token before the error
            self.fail_request(request_id, error, "structured_outputs")

    def _fail_pairs_sampled_apart(self, batch: list[Request], tokens: list[int]) -> None:
        for request in pairs_sampled_apart(batch, tokens):
            parameter = None if request.data.pair is None else request.data.pair.parameter
            message = f"The platform's worker does not support {parameter}: it sampled the two rows of a request apart."
            self.requests.fail(request, message, parameter)

    def _store_drafts(self, batch: list[Request], drafts: dict[int, list[int]]) -> None:
        """Stores draft tokens, by position in the batch, for the next plans of their requests.

        Those behind a token that the next step has computed meanwhile are dropped.
        """
        for position, tokens in drafts.items():
            request = batch[position]
            if request.status is RequestStatus.RUNNING and not request.has_token_in_flight:
                request.draft_token_ids = tokens

    def _end_drafts(self, plan: SchedulerOutput, batch: list[Request]) -> None:
        """Records that a plan's draft tokens are not in flight any more."""
        for position, drafts in plan.draft_token_ids.items():
            if batch[position] is not RESTARTED:  # a restarted request has none
                batch[position].num_drafts_in_flight -= len(drafts)

    def _apply_draft_results(self, plan: SchedulerOutput, batch: list[Request], output: ModelRunnerOutput) -> None:
        """Counts draft tokens, and chooses the state of requests whose draft tokens were verified; see `StateSlots`."""
        count_draft_tokens(self._stats, plan, output)
        states = self._kv_cache.states
        if states is None:
            return
        for position in plan.draft_token_ids:
            request = batch[position]
            if request.status is RequestStatus.RUNNING:
                states.accept_drafts(request.table, len(output.further_token_ids.get(position, ())))

    def _finish_pooled(self, batch: list[Request], vectors: dict[int, bytes], outputs: list[EngineCoreOutput]) -> None:
        """Finishes the pooling requests whose vectors are in the results."""
        finished = []
        for position, vector in vectors.items():
            request = batch[position]
            if request.status is not RequestStatus.FINISHED:
                output = make_output(request, [], FinishReason.STOP)
                output.pooling_output = vector
                outputs.append(output)
                finished.append(request)
        self.requests.finish(finished)

    def _fail_rows(self, batch: list[Request], errors: dict[int, str], outputs: list[EngineCoreOutput]) -> None:
        """Fails the requests whose rows failed, evicts their blocks, and restarts the requests that read them."""
        failed: list[Request] = []
        tables: list[BlockTable] = []
        for position, message in errors.items():
            if batch[position] is RESTARTED:
                continue  # it failed because it read blocks of a failed request
            request = batch[position].listed
            if request in failed:
                continue  # because of its other side
            parameter = request.data.sampling_params.narrowed_by if message == NOTHING_TO_SAMPLE else None
            if parameter is None:  # otherwise its keys and values are correct: only the sampling failed
                tables += [side.table for side in request.sides]  # also if it has ended meanwhile
                if request.items and self._encoders is not None:
                    self._encoders.discard(request)
            if request.status is not RequestStatus.FINISHED:
                ended = final_output(request, FinishReason.ERROR, None, message)
                ended.error_parameter = parameter
                outputs.append(ended)
                failed.append(request)
        if dependents := self._kv_cache.discard(tables):
            self._restart(set(dependents), [batch, *self._batches.values()])
        self.requests.finish(failed)

    def _restart(self, tables: set[BlockTable], batches: Iterable[list[Request]]) -> None:
        """Restarts the requests of these tables, whose blocks were freed.

        Args:
            batches: Batches in flight. Their results for these requests are dropped.
        """
        affected: dict[Request, None] = {}  # an ordered set: all ranks must restart them in the same order
        for batch in batches:
            for position, request in enumerate(batch):
                if any(side.table in tables for side in request.listed.sides):
                    affected[request.listed] = None
                    batch[position] = RESTARTED
        for request in affected:
            if request.status is not RequestStatus.FINISHED:
                self.requests.restart(request)

    def check_integrity(self) -> None:
        """Raises AssertionError unless requests, rows and blocks agree."""
        for part in (self.requests, self.kv_loads, self._encoders):
            if part is not None:
                part.check_integrity()


def _wrong_results(plan: SchedulerOutput, output: ModelRunnerOutput, num_rows: int) -> PlatformError:
    return PlatformError(
        f"The workers were given step {plan.step} with {num_rows} rows and answered step {output.step} "
        f"with {len(output.sampled_token_ids)} tokens."
    )

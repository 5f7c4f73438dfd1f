"""Plans one step: which request computes how many tokens, in which KV blocks.

There is no prefill phase and no decode phase. A request has `num_tokens` tokens and has computed
`num_computed_tokens` of them; every step lets requests compute the difference, within one token budget:

    a long prompt                 over several steps (chunked prefill)
    a prompt found in the cache   begins in the middle
    a request that generates      is always one token behind
    a preempted request           begins at 0 again

A step is planned in this order:

    running requests       `running_plan.py`          they go on, and preempt the last of them if blocks run out
    waiting requests       `waiting_plan.py`          they start, if every policy in `admission/` agrees
    long prompts again     `long_prefill_limiter.py`  they get what is left of the budget
    commit                 `step.py`                  planned work counts as done

In prompts with images or audio a step ends before an item that cannot be encoded in it (see `encoder_planner.py`). In
models with sequence states each row also reads and writes a state slot, and the steps of a prompt end where its state
is kept for other requests (see `kv_cache/state_slots.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from mvllm.config.engine_config import SchedulerConfig
from mvllm.kv_cache.kv_cache_manager import KVCacheManager
from mvllm.messages.requests import SchedulerStats
from mvllm.scheduler.admission.encoders import Encoders
from mvllm.scheduler.admission.long_prompts import LongPromptShares, LongPromptTurns, WholePrompts
from mvllm.scheduler.admission.lora_slots import LoRASlots
from mvllm.scheduler.admission.masks import AwaitedMasks
from mvllm.scheduler.admission.pairs import PairRows
from mvllm.scheduler.admission.policy import AdmissionPolicy
from mvllm.scheduler.admission.snapshots import AwaitedSnapshots, SharedPrefixes
from mvllm.scheduler.block_allocator import BlockAllocator
from mvllm.scheduler.encoder_planner import EncoderPlanner
from mvllm.scheduler.grammar_masks import DeferredMasks
from mvllm.scheduler.kv_loads import KVLoads
from mvllm.scheduler.long_prefill_limiter import LongPrefillLimiter
from mvllm.scheduler.request_lists import RequestLists
from mvllm.scheduler.running_plan import RunningPlan
from mvllm.scheduler.state_planner import StatePlanner
from mvllm.scheduler.step import Step
from mvllm.scheduler.step_time_model import StepTimeModel
from mvllm.scheduler.swapping import Swapper
from mvllm.scheduler.waiting_plan import WaitingPlan

_BYPASS_FACTOR = 4
"""At most this many times `max_num_seqs` requests bypass the first one that waits for a LoRA slot."""


class StepPlanner:
    """Plans steps over the requests of a scheduler. Arguments as for Scheduler.

    Args:
        stats: Counters to add to.
        is_speculative, num_placeholders: As for RunningPlan.
        step_times: Estimates the times of steps; None if plans must not depend on time.
        kv_loads: Requests that wait for KV connectors; None without a host tier.
        swapper: Keeps the blocks of preempted requests in host memory; None if they are always computed again.
        encoders: Plans the encoders of images and audio; None if no request has items.
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
        num_placeholders: int,
        num_lookahead_tokens: int,
        can_defer_masks: bool,
        step_times: StepTimeModel | None = None,
        kv_loads: KVLoads | None = None,
        swapper: Swapper | None = None,
        encoders: EncoderPlanner | None = None,
    ) -> None:
        can_chunk = config.enable_chunked_prefill
        self._budget = config.max_num_batched_tokens
        self._requests = requests
        self._stats = stats
        self._states = StatePlanner(kv_cache.states, can_chunk=can_chunk)
        self._kv_loads = kv_loads
        self._encoders = encoders
        self._has_parts = self._states.is_needed or kv_loads is not None or encoders is not None
        assert encoders is None or not (encoders.keeps_spans_whole and self._states.is_needed), (
            "whole spans and snapshots want different ends of steps"
        )
        self._limiter = LongPrefillLimiter(config, step_times)
        blocks = BlockAllocator(
            requests,
            kv_cache,
            stats,
            max_num_seqs=config.max_num_seqs,
            num_lookahead_tokens=num_lookahead_tokens,
            swapper=swapper,
        )
        self._running_plan = RunningPlan(
            requests,
            kv_cache,
            blocks=blocks,
            limiter=self._limiter,
            states=self._states,
            # A mask would depend on the number of draft tokens that are accepted before it.
            masks=DeferredMasks(is_possible=can_defer_masks and num_stages == 1 and not is_speculative),
            encoders=encoders,
            num_stages=num_stages,
            is_speculative=is_speculative,
            num_placeholders=num_placeholders,
            max_step_tokens=config.max_num_batched_tokens,
        )
        self._waiting_plan = WaitingPlan(
            requests,
            kv_cache,
            _admission_policies(config, requests, kv_cache, self._limiter, encoders, max_loras),
            blocks=blocks,
            limiter=self._limiter,
            stats=stats,
            clock=clock,
            can_chunk=can_chunk,
        )

    def limit_placeholders(self, most: int) -> None:
        """See RunningPlan."""
        self._running_plan.limit_placeholders(most)

    def plan(self, number: int) -> Step:
        """Plans a step, and counts its work as done."""
        step, limiter, waiting = Step(number, self._budget), self._limiter, self._requests.waiting
        if self._has_parts:
            self._start_plan()
        if limiter.were_limited:
            limiter.start_step()
        num_preemptions = self._stats.num_preemptions
        self._running_plan.plan(step)
        can_admit = num_preemptions == self._stats.num_preemptions  # no request takes the place of a preempted one
        limiter.num_waiting = 0
        if can_admit and waiting:
            self._waiting_plan.plan(step)
        if limiter.were_limited and step.budget and limiter.start_round_2(others_generate=step.generates):
            self._running_plan.plan_held_back(step)
            if can_admit and step.budget and waiting:
                self._waiting_plan.plan(step)
        assert step.batch or not step.plan.new_block_rows, "blocks were planned for a row that does not compute"
        step.commit()
        if self._has_parts:
            self._end_plan(step)
        return step

    def is_ordinary(self, step: Step) -> bool:
        """Whether requests generate in the last step, and no prompt's share is a cap, see `LongPrefillLimiter`."""
        return not self._limiter.is_capped and step.generates

    def _start_plan(self) -> None:
        if self._kv_loads is not None:
            self._kv_loads.start_plan()
        self._states.start_plan()
        if self._encoders is not None:
            self._encoders.start_plan()

    def _end_plan(self, step: Step) -> None:
        self._states.end_plan(step.plan, step.batch)
        if self._encoders is not None:
            self._encoders.end_plan()


def _admission_policies(
    config: SchedulerConfig,
    requests: RequestLists,
    kv_cache: KVCacheManager,
    limiter: LongPrefillLimiter,
    encoders: EncoderPlanner | None,
    max_loras: int,
) -> list[AdmissionPolicy]:
    """The policies that an engine needs, in the order in which they are asked. Those that need no lookup come first."""
    can_chunk, states = config.enable_chunked_prefill, kv_cache.states
    policies: list[AdmissionPolicy] = []
    if max_loras:
        policies.append(LoRASlots(max_loras, max_bypasses=_BYPASS_FACTOR * config.max_num_seqs))
    if can_chunk:
        policies.append(LongPromptTurns(limiter))
    if states is not None:
        policies.append(AwaitedSnapshots(states))
    policies += [AwaitedMasks(), PairRows(requests.rows)]
    if not can_chunk:
        policies.append(WholePrompts())
    if states is not None:
        policies.append(SharedPrefixes(states, can_chunk=can_chunk))
    if can_chunk:
        policies.append(LongPromptShares(limiter))
    if encoders is not None:
        policies.append(Encoders(encoders, can_chunk=can_chunk))
    return policies

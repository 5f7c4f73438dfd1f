"""Builders for the scheduler's tests, and a minimal engine."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from functools import partial

from mvllm.config.engine_config import SchedulerConfig
from mvllm.config.multimodal import EncoderLimits, MultiModalModel
from mvllm.kv_cache.host_tier import HostTier
from mvllm.kv_cache.kv_cache_manager import KVCacheManager
from mvllm.kv_cache.prefix_search import group_hash
from mvllm.kv_cache.state_kv_cache_manager import StateKVCacheManager
from mvllm.kv_transfer.connectors import KVConnectors
from mvllm.messages.lora import LoRARequest
from mvllm.messages.multimodal import MultiModalItem
from mvllm.messages.pooling_params import PoolingParams, PoolingType
from mvllm.messages.requests import EngineCoreOutput, EngineCoreRequest, FinishReason, PositionLogprobs, RequestPair
from mvllm.messages.sampling_params import SamplingParams
from mvllm.messages.scheduler_output import ModelRunnerOutput, SchedulerOutput
from mvllm.scheduler.encoder_planner import EncoderPlanner
from mvllm.scheduler.request import Request
from mvllm.scheduler.scheduler import Scheduler
from mvllm.scheduler.swapping import NO_COSTS, CopyCosts
from tests.unit.scheduler.fake_runner import (
    COMBINER,
    COMBINER_SETTINGS,
    GROUP,
    FakeRunner,
    fingerprints,
    first_print,
)
from tests.unit.scheduler.state_runner import StateRunner

_names = itertools.count()


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 64,
    enable_chunked_prefill: bool = True,
    enable_caching: bool = True,
    policy: str = "fcfs",
    hash_seed: int | None = 0,
    clock=lambda: 1.0,
    num_stages: int = 1,
    max_loras: int = 0,
    windows: tuple[int | None, ...] = (None,),
    num_speculative_tokens: int = 0,
    num_lookahead_tokens: int = 0,
    workers_keep_drafts: bool = False,
    adapts_drafts: bool = False,
    can_defer_masks: bool = False,
    num_state_slots: int = 0,
    state_snapshot_interval: int = 8,
    least_snapshot_distance: int = 4,
    host_tier: HostTier | None = None,
    connectors: KVConnectors | None = None,
    preemption_mode: str = "recompute",
    copy_costs: CopyCosts = NO_COSTS,
    encoders: EncoderPlanner | None = None,
    **limits: int | None,
) -> Scheduler:
    make_kv_cache = KVCacheManager
    if num_state_slots:
        make_kv_cache = partial(
            StateKVCacheManager,
            num_state_slots=num_state_slots,
            state_snapshot_interval=state_snapshot_interval,
            least_snapshot_distance=least_snapshot_distance,
        )
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_chunked_prefill=enable_chunked_prefill,
            policy=policy,
            **limits,
        ),
        max_model_len=max_model_len,
        kv_cache=make_kv_cache(
            num_blocks=num_blocks,
            block_size=block_size,
            enable_caching=enable_caching,
            hash_seed=hash_seed,
            windows=windows,
            max_step_tokens=max_num_batched_tokens,
            tier=host_tier,
        ),
        clock=clock,
        num_stages=num_stages,
        max_loras=max_loras,
        num_speculative_tokens=num_speculative_tokens,
        num_lookahead_tokens=num_lookahead_tokens,
        workers_keep_drafts=workers_keep_drafts,
        adapts_drafts=adapts_drafts,
        can_defer_masks=can_defer_masks,
        connectors=connectors,
        preemption_mode=preemption_mode,
        copy_costs=copy_costs,
        encoders=encoders,
    )


def make_encoders(
    *,
    step_tokens: int = 16,
    cache_tokens: int = 16,
    both_ways: bool = False,
    cross_attention: bool = False,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 64,
    can_chunk: bool = True,
) -> EncoderPlanner:
    return EncoderPlanner(
        MultiModalModel(spans_attend_both_ways=both_ways, cross_attention=cross_attention),
        EncoderLimits(step_tokens, cache_tokens, cache_tokens),
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        can_chunk=can_chunk,
    )


def make_pair(prompt: list[int]) -> RequestPair:
    """A companion whose logits FakeRunner combines with those of its request."""
    return RequestPair(COMBINER, prompt, COMBINER_SETTINGS, parameter="scale", prompt_parameter="other_prompt")


def companion_prompt(request: EngineCoreRequest) -> list[int] | None:
    """The prompt of a request's companion; None without one."""
    return None if request.pair is None else request.pair.prompt_token_ids


def make_request(
    prompt: int | list[int] = 6,
    *,
    request_id: str | None = None,
    priority: int = 0,
    cache_salt: str | None = None,
    sibling_group: str | None = None,
    eos: list[int] | None = None,
    lora_int_id: int = 0,
    kv_transfer_params: dict | None = None,
    pooling: PoolingType | None = None,
    companion: list[int] | None = None,
    items: list[MultiModalItem] | None = None,
    **params: object,
) -> EngineCoreRequest:
    """A request. An integer prompt stands for that many tokens, different from those of all other requests."""
    number = next(_names)
    if isinstance(prompt, int):
        prompt = [1000 + 100 * number + i for i in range(prompt)]
    return EngineCoreRequest(
        request_id=request_id or f"request-{number}",
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(**{"max_tokens": 4, **params}),
        eos_token_ids=eos or [],
        priority=priority,
        cache_salt=cache_salt,
        sibling_group=sibling_group,
        pooling_params=None if pooling is None else PoolingParams(pooling_type=pooling, normalize=True),
        pair=None if companion is None else make_pair(companion),
        kv_transfer_params=kv_transfer_params,
        items=items or [],
        lora_request=LoRARequest(f"adapter-{lora_int_id}", lora_int_id, f"/adapters/{lora_int_id}")
        if lora_int_id
        else None,
    )


class Result:
    """All outputs of one request."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] = []
        self.conditional_logprobs: list[float] = []
        self.prompt_logprobs: list[PositionLogprobs] | None = None
        self.outputs: list[EngineCoreOutput] = []

    def add(self, output: EngineCoreOutput) -> None:
        assert self.finish_reason is None, "an output after the last"
        if output.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "prompt logprobs twice"
            self.prompt_logprobs = output.prompt_logprobs
        self.token_ids.extend(output.new_token_ids)
        self.logprobs.extend(output.logprobs or [])
        self.conditional_logprobs.extend(output.conditional_logprobs or [])
        self.outputs.append(output)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[-1].finish_reason if self.outputs else None

    @property
    def num_cached_tokens(self) -> int:
        return self.outputs[-1].num_cached_tokens


class Engine:
    """A scheduler with a fake runner. Every step ends with `check_integrity`.

    Args:
        depth: Plans in flight at once; with 2, step N + 1 is planned before the results of step N are back.
        make_runner: The class of the runner; None for one that fits the model.
    """

    def __init__(
        self, scheduler: Scheduler, *, depth: int = 1, make_runner: Callable[..., FakeRunner] | None = None
    ) -> None:
        config, kv_cache = scheduler._config, scheduler._kv_cache
        self.scheduler = scheduler
        self.depth = depth
        make_runner = make_runner or (FakeRunner if kv_cache.states is None else StateRunner)
        self.runner = make_runner(
            num_blocks=kv_cache.num_blocks,
            block_size=kv_cache.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            windows=kv_cache._windows,
        )
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.results: dict[str, Result] = {}
        self.last_plan: SchedulerOutput | None = None
        self.requests: list[Request] = []  # with companions

    def add(self, *requests: EngineCoreRequest) -> None:
        for request in requests:
            self.results[request.request_id] = Result()
            self.scheduler.add_request(request)
            self.requests += self.scheduler.requests.by_id[request.request_id].sides

    def step(self) -> SchedulerOutput:
        """Plans one step, and applies the oldest results once `depth` plans are in flight."""
        plan = self.last_plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        self.check_plan(plan)
        self.in_flight.append((plan, self.runner.execute(plan)))
        while len(self.in_flight) >= self.depth:
            self.collect()
        return plan

    def collect(self) -> None:
        outputs = self.scheduler.update_from_output(*self.in_flight.popleft())
        self.scheduler.check_integrity()
        for output in outputs.outputs:
            self.results[output.request_id].add(output)

    def check_plan(self, plan: SchedulerOutput) -> None:
        """Raises AssertionError if a plan overwrites a snapshot."""
        states = self.scheduler._kv_cache.states
        if states is not None:
            pending = {slot for table in states._with_pending for _, slot in table.state.pending}
            kept = {*states._pool.cached_blocks(), *pending}
            written = {*plan.write_slots, *(slot for slots in plan.draft_slots.values() for slot in slots)}
            for request in self.scheduler.requests.running:
                for side in request.sides:
                    assert not kept & written & {*side.table.state.written}, "a snapshot is overwritten"

    def check_snapshots(self) -> int:
        """Raises AssertionError unless every snapshot holds the state behind its tokens. Returns their number.

        Only after all results are back.
        """
        kv_cache, runner = self.scheduler._kv_cache, self.runner
        assert kv_cache.states is not None and isinstance(runner, StateRunner)
        contents = {}
        for request in self.requests:
            for i, block_hash in enumerate(request.table.block_hashes):
                tokens = request.token_ids[: (i + 1) * kv_cache.block_size]
                contents[block_hash] = (request.lora_int_id, tokens)
        snapshots = kv_cache.states._pool._block_by_hash
        for name, slot in snapshots.items():
            assert runner.states[slot] == contents[name], f"slot {slot} does not hold what its name says"
        return len(snapshots)

    def check_hashes(self) -> None:
        """Raises AssertionError unless every block with a confirmed hash has the contents of that hash."""
        kv_cache, runner = self.scheduler._kv_cache, self.runner
        unconfirmed = {block for record in kv_cache.unconfirmed.records for block in record.writers}
        contents: dict[bytes, list[int]] = {}
        for request in self.requests:
            prints = fingerprints(request.token_ids, first_print(request.lora_int_id))
            for i, block_hash in enumerate(request.table.block_hashes):
                for group in range(kv_cache.num_groups):
                    own = prints[i * kv_cache.block_size : (i + 1) * kv_cache.block_size]
                    contents[group_hash(block_hash, group)] = [each + group * GROUP for each in own]
        for name, block in kv_cache._pool._block_by_hash.items():
            if block not in unconfirmed:
                held = runner.slots[block * kv_cache.block_size : (block + 1) * kv_cache.block_size]
                assert held == contents[name], f"block {block} does not hold what its name says"

    def run(self, *requests: EngineCoreRequest, max_steps: int = 10_000) -> list[Result]:
        """Adds requests and steps until none is left. Returns the results of these requests."""
        self.add(*requests)
        for _ in range(max_steps):
            if not self.scheduler.has_requests():
                while self.in_flight:
                    self.collect()
                return [self.results[request.request_id] for request in requests]
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")

"""The engine core: a scheduler, an executor, and `step()`.

add_request ──> Scheduler ──> StepPipeline: launch ══ Executor ══ collect ──> outputs
call ──> Answers ──> Pause, SleepMode, WeightCommands, LoRACommands, EngineCore: between two steps
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import msgspec

from mvllm.config.engine_config import EngineConfig, with_max_model_len
from mvllm.config.rope_parameters import prompt_cache_key
from mvllm.engine.core.answers import Answers, answers
from mvllm.engine.core.block_saves import BlockSaves
from mvllm.engine.core.grammars import Grammars
from mvllm.engine.core.kv_cache_sizing import KVCacheSummary, choose_block_size, no_kv_cache, size_kv_cache
from mvllm.engine.core.kv_event_reporting import KVEventReporter
from mvllm.engine.core.kv_tiers import KVTiers
from mvllm.engine.core.lora_commands import LoRACommands
from mvllm.engine.core.lora_manager import LoRAManager
from mvllm.engine.core.pause import Pause, PauseState
from mvllm.engine.core.sleep import ReleasedMemory
from mvllm.engine.core.sleep_mode import SleepMode
from mvllm.engine.core.step_pipeline import StepPipeline, max_steps_in_flight
from mvllm.engine.core.weight_commands import WeightCommands
from mvllm.engine.core.weight_updates import WeightUpdateManager
from mvllm.errors import EngineDeadError, EngineSleepingError, MvllmError, RequestError, UnsupportedMethodError
from mvllm.executor.factory import can_sample_later, make_executor
from mvllm.executor.worker_topology import launch_topology
from mvllm.kv_cache.kv_cache_manager import KVCacheManager, NullKVCacheManager
from mvllm.kv_cache.state_kv_cache_manager import StateKVCacheManager
from mvllm.logging import get_logger
from mvllm.messages.commands import (
    CallModel,
    CallWorkers,
    CheckHealth,
    EngineCommand,
    ResetEncoderCache,
    ResetPrefixCache,
)
from mvllm.messages.kv_events import CacheChanges
from mvllm.messages.requests import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    SchedulerStats,
)
from mvllm.models.checkpoint_support import runs_natively
from mvllm.platform.interface import Platform
from mvllm.scheduler.encoder_planner import make_encoder_planner
from mvllm.scheduler.scheduler import Scheduler
from mvllm.structured_output.llguidance_library import check_available

logger = get_logger(__name__)

_R = TypeVar("_R")
_T = TypeVar("_T")


class EngineCore:
    """Turns requests into tokens, one step at a time. Used from one thread.

    Args:
        config: The resolved configuration.
        platform: The platform to run on.
        on_phase: Called with the name of each phase of start-up as it begins.

    Attributes:
        cache_summary: The KV cache as it was sized.
        num_workers: Workers of this engine; each may drive several devices.
        start_seconds: Seconds per start-up phase, by name.
    """

    def __init__(
        self, config: EngineConfig, platform: Platform, on_phase: Callable[[str], None] = lambda phase: None
    ) -> None:
        self.config = config
        self._on_phase = on_phase
        self.start_seconds: dict[str, float] = {}
        self.cache_summary: KVCacheSummary
        # Models that a ModelImplementation runs have one RoPE for prompts of every length.
        self._position_key = prompt_cache_key(config.model) if runs_natively(config.model) else lambda prompt_len: 0
        self._needs_identical_plans = config.parallel.distributed_executor_backend == "external_launcher"
        self._supports_prefix_caching = platform.capabilities.prefix_caching
        self.num_workers = launch_topology(config, platform).num_workers
        self._executor = executor = self._timed("start workers", lambda: make_executor(config, platform))
        self._tiers: KVTiers | None = None
        lora: LoRAManager | None = None
        try:
            self._load_model()
            if self.config.kv_transfer.is_used:
                # The model is that of its own length, which host blocks name.
                make_tiers = partial(KVTiers, executor.config, executor, self.cache_summary)
                self._tiers = self._timed("map host blocks", make_tiers)
            if self.config.lora is not None:
                lora = LoRAManager(self.config.lora, executor, hashes_files=self._tiers is not None)
            kv_cache = self._make_kv_cache_manager()
            self.scheduler = scheduler = self._make_scheduler(kv_cache, lora)
            self._kv_events = KVEventReporter(self.config, kv_cache.record_events, scheduler.kv_loads)
        except BaseException:
            if self._tiers is not None:
                self._tiers.connectors.close()
            executor.shutdown()
            raise
        self._weights = weights = WeightUpdateManager(executor, self.num_workers)
        self._grammars = grammars = Grammars(self.config.model, scheduler, in_submit=self._needs_identical_plans)
        self._steps = steps = StepPipeline(
            scheduler,
            executor,
            num_stages=config.parallel.pipeline_parallel_size,
            is_async=bool(self.config.scheduler.async_scheduling),
            masks=grammars,
            weight_version=lambda: weights.version,
            load_adapters=None
            if lora is None
            else partial(lora.load_for_step, in_use=lambda: scheduler.running_lora_ids),
        )
        self._saves = BlockSaves(scheduler, steps)
        self._memory = memory = ReleasedMemory()
        self._pause = Pause(scheduler, steps, grammars, weights.check_can_run, self.add_request)
        updates = WeightCommands(weights, self._pause, memory, scheduler, steps, self._fail_all_requests)
        self._lora = LoRACommands(lora, weights, updates, memory, scheduler, steps)
        sleep = SleepMode(
            executor,
            memory,
            offloads_weights=platform.capabilities.offloads_weights,
            weight_updates=weights,
            weights=updates,
            lora_manager=lora,
            scheduler=scheduler,
            steps=steps,
            saves=self._saves,
            kv_events=self._kv_events,
            fail_all_requests=self._fail_all_requests,
        )
        self._answers = Answers(self, self._pause, updates, self._lora, sleep)
        logger.info("%s", self.cache_summary)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queues a validated request.

        Raises:
            EngineSleepingError: The engine sleeps, or its weights are unusable.
            RequestError: The id is in use, or the request needs structured outputs and their library is not installed.
        """
        self._weights.check_usable()
        if self._pause.hold(request):
            return
        if self._memory.tags:
            raise EngineSleepingError("The engine has been put to sleep. Wake it up (wake_up) before sending requests.")
        if request.sampling_params.structured_outputs is not None:
            check_available()
        if request.lora_request is not None:
            self._lora.require()
        if key := self._position_key(len(request.prompt_token_ids)):
            request = msgspec.structs.replace(request, position_key=key)
        if (pair := request.pair) is not None and (key := self._position_key(len(pair.prompt_token_ids))):
            request = msgspec.structs.replace(request, pair=msgspec.structs.replace(pair, position_key=key))
        if request.sibling_group is not None and not self._supports_prefix_caching:
            request = msgspec.structs.replace(request, sibling_group=None)
        self.scheduler.add_request(request)
        if request.sampling_params.structured_outputs is not None:
            try:
                self._grammars.submit(request)
            except BaseException:  # nobody would wake it
                self.scheduler.abort_requests([request.request_id])
                raise

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Drops requests in any state; they have no further output. Unknown ids are ignored."""
        ids = list(request_ids)
        self._pause.drop_held(ids)
        self.scheduler.abort_requests(ids)
        self._kv_events.publish()
        self._grammars.cancel(ids)

    def has_requests(self) -> bool:
        """Whether `step` has work."""
        if self._steps.has_work:
            return True
        return self._pause.state is not PauseState.PAUSED and (self.scheduler.has_requests() or self._saves.has_unsaved)

    def step(self) -> EngineCoreOutputs:
        """Schedules and launches a step, and returns the outputs of the oldest step in flight.

        Raises:
            EngineDeadError: A step failed as a whole, now or earlier; the cause is kept.
        """
        steps = self._steps
        if steps.failure is not None:
            raise EngineDeadError(f"The engine stopped after an earlier error: {steps.failure!r}") from steps.failure
        if (held := steps.pop_held()) is not None:
            held.stats = self.make_stats()
            return held
        if self._pause.state is PauseState.PAUSED:
            return EngineCoreOutputs(stats=self.make_stats())
        try:
            if self._grammars.begin_step(is_idle=not steps.num_in_flight) or self._saves.wait():
                return EngineCoreOutputs(stats=self.make_stats())
            while steps.num_in_flight < steps.max_in_flight and (
                self.scheduler.has_requests() or (self._saves.has_unsaved and not steps.num_in_flight)
            ):
                if not steps.launch():
                    break
            outputs = steps.collect() if steps.num_in_flight else EngineCoreOutputs(stats=self.make_stats())
            self._kv_events.publish()
            return outputs
        except BaseException as e:
            # An unfinished step, also an interrupted one, leaves scheduler, rows and cached blocks inconsistent: later
            # results would be wrong.
            steps.failure = steps.failure or e
            if isinstance(e, Exception):
                self.shutdown()  # frees the workers' memory
            raise

    @property
    def next_step(self) -> int:
        """The number of the step that the next `step` call collects."""
        return self._steps.next_step

    @property
    def has_local_worker(self) -> bool:
        """Whether the worker runs in this process."""
        return self._executor.has_local_worker

    def make_stats(self) -> SchedulerStats:
        """The scheduler's current state."""
        return self.scheduler.make_stats()

    @property
    def report_seconds(self) -> float | None:
        """How often `pop_cache_changes` is called while there is no work; None for never."""
        return self._kv_events.report_seconds

    def pop_cache_changes(self) -> CacheChanges | None:
        """How the prefix cache has changed since the last call; None if it has not, or there is one replica.

        Also publishes the events since the last step.
        """
        self._kv_events.publish()
        return self._kv_events.pop_changes()

    def on_failure(self, callback: Callable[[Exception], None]) -> None:
        """Registers `callback`, which is called once, from any thread, when the workers can no longer be used."""
        self._executor.on_failure(callback)

    def call(self, command: EngineCommand[_R]) -> _R:
        """The answer to a command.

        Raises:
            Exception: What the method that answers it raised.
        """
        return self._answers.call(command)

    def collective_rpc(self, method: str, args: tuple[Any, ...] = (), timeout: float | None = None) -> list[Any]:
        """Calls a method of every worker, see `Executor.collective_rpc`."""
        return self._executor.collective_rpc(method, args, timeout=timeout)

    def apply_model(self, function: Callable[[Any], _T]) -> list[_T]:
        """Calls a function with the model of every worker, see `Executor.apply_model`."""
        return self._executor.apply_model(function)

    @answers(CallWorkers)
    def call_workers(self, method: str, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Calls a method of `worker_extension_cls` on every worker; returns the results in rank order."""
        self._steps.collect_all()
        return self._executor.collective_rpc("call_extension", (method, args, kwargs))

    @answers(CallModel)
    def call_model(self, method: str, args: list[Any]) -> Any:
        """Calls a method of the model between two steps, see `WorkerProtocol.call_model`.

        Raises:
            EngineSleepingError: The weights sleep.
            RequestError: The model has no such method, an argument is not valid, or no rank of this process answers.
        """
        self._memory.require_weights(f"calling {method}")
        self._steps.collect_all()
        for result in self._executor.collective_rpc("call_model", (method, args)):
            if result not in (None, b""):
                return result
        if not self._needs_identical_plans:
            raise RequestError(f"The model's method {method!r} returned nothing on any rank.", parameter="model")
        raise RequestError(
            f"The rank in this process does not answer {method}, and with external_launcher each process calls its own "
            "rank only. Call it on the first rank of the last pipeline stage."
        )

    @answers(ResetPrefixCache)
    def reset_prefix_cache(self) -> bool:
        """Clears the prefix cache; returns False, with nothing changed, while requests use blocks."""
        is_reset = self.scheduler.reset_prefix_cache()
        self._kv_events.publish()
        return is_reset

    @answers(ResetEncoderCache)
    def reset_encoder_cache(self) -> bool:
        """Drops encoder results that no running request uses. Returns whether none is left."""
        return self.scheduler.reset_encoder_cache()

    @answers(CheckHealth)
    def check_health(self) -> None:
        """Raises unless every worker answers a call."""
        self._executor.collective_rpc("check_health")

    def _fail_all_requests(self, message: str) -> None:
        held = self._pause.drop_held()
        self._steps.hold([EngineCoreOutput(each, [], FinishReason.ERROR, error=message) for each in held])
        ids = self.scheduler.request_ids
        for request_id in ids:
            self.scheduler.fail_request(request_id, message)
        self._grammars.cancel(ids)
        self._steps.hold(self.scheduler.pop_outputs())

    def shutdown(self) -> None:
        """Ends the workers. Idempotent."""
        self._grammars.shutdown()
        tiers, self._tiers = self._tiers, None
        if tiers is not None:
            if self._steps.failure is None:
                with contextlib.suppress(MvllmError):
                    self._steps.collect_all()
                    self.abort_requests(self.scheduler.request_ids)
                    self._saves.save_all()
            tiers.connectors.close()
        self._kv_events.close()
        self._executor.shutdown()

    def _load_model(self) -> None:
        """Loads the model on the workers, and allocates its KV cache. Sets `cache_summary`, and `config` with the
        length that the cache has room for."""
        self.config = self._executor.config
        self._timed("load model", self._executor.start)
        self.cache_summary = self._timed("size KV cache", self._size_kv_cache)
        self.config = with_max_model_len(self.config, self.cache_summary.max_model_len)
        self._timed("allocate KV cache", self._allocate_kv_cache)

    def _make_scheduler(self, kv_cache: KVCacheManager, lora: LoRAManager | None) -> Scheduler:
        config, speculative, tiers = self.config, self.config.speculative, self._tiers
        scheduling, num_stages = config.scheduler, config.parallel.pipeline_parallel_size
        max_in_flight = max_steps_in_flight(num_stages, is_async=bool(scheduling.async_scheduling))
        if self._needs_identical_plans:
            scheduling = dataclasses.replace(scheduling, long_prefill_slowdown=None)  # it depends on time
        first_step = 0 if tiers is None else tiers.measure_copies(self.cache_summary)
        return Scheduler(
            scheduling,
            max_model_len=config.model.max_model_len,
            kv_cache=kv_cache,
            num_stages=num_stages,
            max_loras=0 if config.lora is None else config.lora.max_loras,
            num_speculative_tokens=0 if speculative is None else speculative.num_speculative_tokens,
            num_lookahead_tokens=0 if speculative is None else speculative.num_lookahead_tokens,
            workers_keep_drafts=max_in_flight == 2 and num_stages == 1,
            encoders=make_encoder_planner(config),
            can_defer_masks=max_in_flight == 2 and num_stages == 1 and can_sample_later(self._executor),
            first_step=first_step,
            adapts_drafts=speculative is not None and speculative.adaptive and not self._needs_identical_plans,
            adapter_hash=None if lora is None else lora.file_hash,
            **({} if tiers is None else tiers.scheduler_arguments),
        )

    def _size_kv_cache(self) -> KVCacheSummary:
        if self.config.model.kind.is_encoder:
            return no_kv_cache(self.config.model.max_model_len)
        needs = self._executor.kv_cache_needs()
        configured = self.config.cache.kv_cache_memory_bytes
        choose_block_size(self.config, needs)
        available = [configured] * len(needs) if configured is not None else self._executor.available_kv_bytes()
        return size_kv_cache(self.config, needs, available)

    def _make_kv_cache_manager(self) -> KVCacheManager:
        config, summary = self.config, self.cache_summary
        if config.model.kind.is_encoder:
            return NullKVCacheManager(config.model.max_model_len)
        make: Callable[..., KVCacheManager] = KVCacheManager
        if summary.num_state_slots:
            make = partial(
                StateKVCacheManager,
                num_state_slots=summary.num_state_slots,
                state_snapshot_interval=config.cache.state_snapshot_interval,
            )
        return make(
            num_blocks=summary.num_blocks,
            block_size=summary.block_size,
            enable_caching=config.cache.enable_prefix_caching,
            hash_seed=config.cache.prefix_caching_seed,
            windows=summary.windows,
            max_step_tokens=config.scheduler.max_num_batched_tokens,
            root=None if self._tiers is None else self._tiers.namespace,
            tier=None if self._tiers is None else self._tiers.tier,
        )

    def _allocate_kv_cache(self) -> None:
        if self.config.model.max_model_len != self._executor.config.model.max_model_len:
            with contextlib.suppress(UnsupportedMethodError):  # its rows are as long as the model permits
                self._executor.collective_rpc("update_max_model_len", (self.config.model.max_model_len,))
        if len(self.cache_summary.windows) > 1:
            self._executor.collective_rpc("group_layers", (list(self.cache_summary.windows),))
        summary = self.cache_summary
        state = (summary.num_state_slots,) if summary.num_state_slots else ()
        self._executor.allocate_kv_cache(summary.num_blocks, summary.block_size, *state)

    def _timed(self, phase: str, action: Callable[[], _T]) -> _T:
        self._on_phase(phase)
        start = time.perf_counter()
        result = action()
        self.start_seconds[phase] = time.perf_counter() - start
        return result

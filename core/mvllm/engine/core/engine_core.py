"""The engine core: a scheduler, an executor, and `step()`.

`step()` has two halves, `_launch_step` and `_collect_step`, with a queue of steps between them: with asynchronous
scheduling, or with pipeline stages, steps are launched before earlier ones are collected. Nothing else differs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import msgspec

from mvllm.config.engine_config import EngineConfig, with_max_model_len
from mvllm.config.rope_parameters import prompt_cache_key
from mvllm.engine.core.encoder_planning import make_encoder_planner
from mvllm.engine.core.grammar_vocabulary import load_vocabulary
from mvllm.engine.core.kv_cache_sizing import KVCacheSummary, choose_block_size, no_kv_cache, size_kv_cache
from mvllm.engine.core.kv_event_reporting import KVEventReporter
from mvllm.engine.core.kv_tiers import KVTiers
from mvllm.engine.core.lora_manager import LoRAManager
from mvllm.engine.core.rollouts import PauseState
from mvllm.engine.core.sleep import WEIGHTS
from mvllm.engine.core.sleep_mode import CoreSleep
from mvllm.engine.core.weight_updates import WeightUpdateManager
from mvllm.errors import (
    ConfigError,
    EngineDeadError,
    EngineSleepingError,
    MvllmError,
    RequestError,
    UnsupportedMethodError,
)
from mvllm.executor.factory import can_sample_later, make_executor
from mvllm.executor.worker_topology import launch_topology
from mvllm.kv_cache.kv_cache_manager import KVCacheManager
from mvllm.kv_cache.null_kv_cache_manager import NullKVCacheManager
from mvllm.kv_cache.state_kv_cache_manager import StateKVCacheManager
from mvllm.logging import get_logger
from mvllm.messages.core_protocol import UtilityArg
from mvllm.messages.kv_events import CacheChanges
from mvllm.messages.requests import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    SchedulerStats,
)
from mvllm.messages.scheduler_output import ModelRunnerOutput, SchedulerOutput
from mvllm.models.checkpoint_support import runs_natively
from mvllm.platform.interface import Platform
from mvllm.scheduler.scheduler import Scheduler
from mvllm.structured_output.llguidance_library import check_available
from mvllm.structured_output.structured_output_manager import StructuredOutputManager

logger = get_logger(__name__)

UTILITY_METHODS = frozenset(
    {
        "abandon_weight_update",
        "add_lora",
        "call_workers",
        "check_health",
        "check_sleep",
        "decode_images",
        "finish_weight_update",
        "has_joined_weight_transfer",
        "init_weight_transfer",
        "is_scheduler_paused",
        "is_scheduler_running",
        "pause_scheduler",
        "remove_lora",
        "reset_encoder_cache",
        "reset_prefix_cache",
        "resume_scheduler",
        "sleep",
        "start_weight_update",
        "update_lora",
        "update_weights",
        "wake_up",
        "weight_info",
    }
)
"""The methods of EngineCore that front ends call by name, through `call_utility`."""

_GRAMMAR_WAIT_SECONDS = _KV_WAIT_SECONDS = 0.01
"""The longest wait of a step that has nothing to compute for a grammar, or for a KV connector: commands are handled
between two waits."""

_SAVE_SECONDS = 5.0
"""So long blocks are still saved when the engine is shut down or put to sleep."""

_T = TypeVar("_T")


class EngineCore(CoreSleep):
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
        self._fatal_error: BaseException | None = None
        self._in_flight: deque[tuple[SchedulerOutput, Future[ModelRunnerOutput]]] = deque()
        self._row_errors: dict[int, dict[int, str]] = {}  # step -> position in its batch -> error of the row
        num_stages = config.parallel.pipeline_parallel_size
        # One step per stage fills a pipeline; more would only queue up, also with asynchronous scheduling.
        self._max_in_flight = num_stages if num_stages > 1 else 2 if config.scheduler.async_scheduling else 1
        self._grammar_manager: StructuredOutputManager | None = None
        self._released_memory: tuple[str, ...] = ()  # the TAGS that sleep
        self._offloads_weights = platform.capabilities.offloads_weights
        self._pending_outputs: deque[EngineCoreOutputs] = deque()  # returned by the next steps, one each
        self._pause = PauseState.RUNNING
        self._held_requests: list[EngineCoreRequest] = []  # that came while the engine drains
        # Models run through transformers have one RoPE for prompts of every length.
        self._position_key = prompt_cache_key(config.model) if runs_natively(config.model) else lambda prompt_len: 0
        self._needs_identical_plans = config.parallel.distributed_executor_backend == "external_launcher"
        self._supports_prefix_caching = platform.capabilities.prefix_caching
        self.num_workers = launch_topology(config, platform).num_workers
        self._executor = self._timed("start workers", lambda: make_executor(config, platform))
        self.config = config = self._executor.config
        try:
            self._timed("load model", self._executor.start)
            self.cache_summary = self._timed("size KV cache", self._size_kv_cache)
            built_config = config  # the model is that of its own length, which host blocks name
            self.config = config = with_max_model_len(config, self.cache_summary.max_model_len)
            self._timed("allocate KV cache", self._allocate_kv_cache)
            self._tiers: KVTiers | None = None
            if config.kv_transfer.is_used:
                make_tiers = partial(KVTiers, built_config, self._executor, self.cache_summary)
                self._tiers = self._timed("map host blocks", make_tiers)
        except BaseException:
            self._executor.shutdown()
            raise
        tiers = self._tiers
        speculative = config.speculative
        scheduling = config.scheduler
        if self._needs_identical_plans:
            scheduling = dataclasses.replace(scheduling, long_prefill_slowdown=None)  # it depends on time
        try:
            kv_cache = self._make_kv_cache_manager()
            self.scheduler = Scheduler(
                scheduling,
                max_model_len=config.model.max_model_len,
                kv_cache=kv_cache,
                num_stages=num_stages,
                max_loras=0 if config.lora is None else config.lora.max_loras,
                num_speculative_tokens=0 if speculative is None else speculative.num_speculative_tokens,
                num_lookahead_tokens=0 if speculative is None else speculative.num_lookahead_tokens,
                encoders=make_encoder_planner(config),
                can_defer_masks=self._max_in_flight == 2 and num_stages == 1 and can_sample_later(self._executor),
                **({} if tiers is None else tiers.scheduler_arguments),
            )
            if tiers is not None:
                self.scheduler.skip_steps(tiers.measure_copies(self.scheduler.next_step, self.cache_summary))
                self.scheduler.copy_costs = tiers.costs
            self._kv_events = KVEventReporter(config, kv_cache.record_events, self.scheduler.kv_loads)
        except BaseException:
            if tiers is not None:
                tiers.connectors.close()
            self._executor.shutdown()
            raise
        self._lora_manager: LoRAManager | None = None
        if config.lora is not None:
            in_use = lambda: self.scheduler.running_lora_ids  # noqa: E731
            self._lora_manager = LoRAManager(config.lora, self._executor, in_use, hashes_files=tiers is not None)
            self.scheduler.adapter_hash = self._lora_manager.file_hash
        self._weights = WeightUpdateManager(self._executor, self.num_workers)
        logger.info("%s", self.cache_summary)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queues a validated request.

        Raises:
            EngineSleepingError: The engine sleeps, or its weights are unusable.
            RequestError: The id is in use, or the request needs structured outputs and their library is not installed.
        """
        self._weights.check_usable()
        if self._pause is PauseState.DRAINING:
            self._held_requests.append(request)
            return
        if self._released_memory:
            raise EngineSleepingError("The engine has been put to sleep. Wake it up (wake_up) before sending requests.")
        if request.sampling_params.structured_outputs is not None:
            check_available()
        if request.lora_request is not None:
            self._required_lora_manager  # noqa: B018  (raises where there is none)
        if key := self._position_key(len(request.prompt_token_ids)):
            request = msgspec.structs.replace(request, position_key=key)
        if request.unconditional_prompt_token_ids is not None:
            key = self._position_key(len(request.unconditional_prompt_token_ids))
            request = msgspec.structs.replace(request, unconditional_position_key=key)
        if request.sibling_group is not None and not self._supports_prefix_caching:
            request = msgspec.structs.replace(request, sibling_group=None)
        self.scheduler.add_request(request)
        if request.sampling_params.structured_outputs is not None:
            try:
                self._submit_grammar(request)
            except BaseException:  # nobody would wake it
                self.scheduler.abort_requests([request.request_id])
                raise

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Drops requests in any state; they have no further output. Unknown ids are ignored."""
        ids = list(request_ids)
        if self._held_requests:
            self._held_requests = [held for held in self._held_requests if held.request_id not in ids]
        self.scheduler.abort_requests(ids)
        self._kv_events.publish()
        if self._grammar_manager is not None:
            self._grammar_manager.cancel(ids)

    def has_requests(self) -> bool:
        """Whether `step` has work."""
        if self._pending_outputs or self._in_flight:
            return True
        return self._pause is not PauseState.PAUSED and (self.scheduler.has_requests() or self._has_blocks_to_save)

    def step(self) -> EngineCoreOutputs:
        """Schedules and launches a step, and returns the outputs of the oldest step in flight.

        Raises:
            EngineDeadError: A step failed as a whole, now or earlier; the cause is kept.
        """
        if self._fatal_error is not None:
            raise EngineDeadError(
                f"The engine stopped after an earlier error: {self._fatal_error!r}"
            ) from self._fatal_error
        if self._pending_outputs:
            held = self._pending_outputs.popleft()
            held.stats = self.make_stats()
            return held
        if self._pause is PauseState.PAUSED:
            return EngineCoreOutputs(stats=self.make_stats())
        try:
            if self._grammar_manager is not None:
                self._grammar_manager.begin_step()
                self._apply_compiled_grammars(self._grammar_manager)
                if not self._in_flight and self.scheduler.is_waiting_for_masks:
                    return EngineCoreOutputs(stats=self.make_stats())
            if self.scheduler.kv_loads is not None and self._waits_for_connectors():
                return EngineCoreOutputs(stats=self.make_stats())
            while len(self._in_flight) < self._max_in_flight and (
                self.scheduler.has_requests() or (self._has_blocks_to_save and not self._in_flight)
            ):
                if not self._launch_step():
                    break
            outputs = self._collect_step() if self._in_flight else EngineCoreOutputs(stats=self.make_stats())
            self._kv_events.publish()
            return outputs
        except BaseException as e:
            # An unfinished step, also an interrupted one, leaves scheduler, rows and cached blocks inconsistent: later
            # results would be wrong.
            self._fatal_error = self._fatal_error or e
            if isinstance(e, Exception):
                self.shutdown()  # frees the workers' memory
            raise

    @property
    def next_step(self) -> int:
        """The number of the step that the next `step` call collects."""
        return self._in_flight[0][0].step if self._in_flight else self.scheduler.next_step

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

    def call_utility(self, method: str, *args: UtilityArg) -> Any:
        """Calls one of UTILITY_METHODS; returns its result, False for None.

        Raises:
            ConfigError: `method` is not one of them.
            Exception: What the method raised.
        """
        if method not in UTILITY_METHODS:
            raise ConfigError(f"call_utility({method!r}): an engine core offers {', '.join(sorted(UTILITY_METHODS))}.")
        result = getattr(self, method)(*args)
        return False if result is None else result

    def collective_rpc(self, method: str, args: tuple[Any, ...] = (), timeout: float | None = None) -> list[Any]:
        """Calls a method of every worker, see `Executor.collective_rpc`."""
        return self._executor.collective_rpc(method, args, timeout=timeout)

    def apply_model(self, function: Callable[[Any], _T]) -> list[_T]:
        """Calls a function with the model of every worker, see `Executor.apply_model`."""
        return self._executor.apply_model(function)

    def decode_images(self, codes: bytes, rows: int, columns: int) -> bytes:
        """Decodes images between two steps, see `WorkerProtocol.decode_images`.

        Raises:
            EngineSleepingError: The weights sleep.
            RequestError: The model generates no images, or a code does not exist.
        """
        if WEIGHTS in self._released_memory:
            raise EngineSleepingError("The weights sleep. Wake them up (wake_up) before decoding images.")
        self._collect_all_steps()
        for pixels in self._executor.collective_rpc("decode_images", (codes, rows, columns)):
            if pixels:
                return pixels
        raise RequestError(
            "The rank in this process has no pixel decoder, and with external_launcher each process calls its own rank "
            "only. Decode on the first rank of the last pipeline stage."
        )

    def reset_prefix_cache(self) -> bool:
        """Clears the prefix cache; returns False, with nothing changed, while requests use blocks."""
        is_reset = self.scheduler.reset_prefix_cache()
        self._kv_events.publish()
        return is_reset

    def reset_encoder_cache(self) -> bool:
        """Drops encoder results that no running request uses. Returns whether none is left."""
        return self.scheduler.reset_encoder_cache()

    @property
    def _has_steps_in_flight(self) -> bool:
        return bool(self._in_flight)

    def _collect_all_steps(self) -> None:
        """Waits for the steps in flight. Their outputs are returned by the next call of `step`."""
        while self._in_flight:
            self._hold_outputs(self._collect_step().outputs)

    def _hold_outputs(self, outputs: list[EngineCoreOutput]) -> None:
        if outputs:
            self._pending_outputs.append(EngineCoreOutputs(outputs, weight_version=self._weights.version))

    def _add_held_requests(self) -> None:
        held, self._held_requests = self._held_requests, []
        for request in held:
            try:
                self.add_request(request)
            except MvllmError as e:
                self._hold_outputs([EngineCoreOutput(request.request_id, [], FinishReason.ERROR, error=str(e))])

    def _fail_all_requests(self, message: str) -> None:
        held, self._held_requests = self._held_requests, []
        self._hold_outputs([EngineCoreOutput(r.request_id, [], FinishReason.ERROR, error=message) for r in held])
        ids = self.scheduler.request_ids
        for request_id in ids:
            self.scheduler.fail_request(request_id, message)
        if self._grammar_manager is not None:
            self._grammar_manager.cancel(ids)
        self._hold_outputs(self.scheduler.pop_outputs())

    def check_health(self) -> None:
        """Raises unless every worker answers a call."""
        self._executor.collective_rpc("check_health")

    def shutdown(self) -> None:
        """Ends the workers. Idempotent."""
        if self._grammar_manager is not None:
            self._grammar_manager.shutdown()
        tiers, self._tiers = self._tiers, None
        if tiers is not None:
            if self._fatal_error is None:
                with contextlib.suppress(MvllmError):
                    self._collect_all_steps()
                    self.abort_requests(self.scheduler.request_ids)
                    self._save_blocks()
            tiers.connectors.close()
        self._kv_events.close()
        self._executor.shutdown()

    @property
    def _has_blocks_to_save(self) -> bool:
        """Whether cached blocks are left to be saved to host blocks, by plans without requests if need be."""
        loads = self.scheduler.kv_loads
        return loads is not None and loads.has_unsaved

    def _waits_for_connectors(self) -> bool:
        """Waits for KV connectors if there is nothing else to do; returns whether that is still so."""
        loads, scheduler = self.scheduler.kv_loads, self.scheduler
        assert loads is not None
        for waits in (True, False):
            is_idle = scheduler.is_waiting_for_kv or (not scheduler.has_requests() and loads.has_unsaved)
            if self._in_flight or not is_idle or loads.can_save:
                return False
            if waits:
                loads.wait(_KV_WAIT_SECONDS)
                loads.start_plan()
        return True

    def _save_blocks(self) -> None:
        """Saves what is left to be saved, while there are no requests; for a bounded time."""
        loads, deadline = self.scheduler.kv_loads, time.monotonic() + _SAVE_SECONDS
        while loads is not None and loads.has_unsaved and time.monotonic() < deadline:
            if loads.can_save:
                self._launch_step()
                self._collect_all_steps()
            else:
                loads.wait(_KV_WAIT_SECONDS)
                loads.start_plan()

    def _submit_grammar(self, request: EngineCoreRequest) -> None:
        """Has the request's grammar compiled, on another thread; the request waits, the engine does not.

        Ranks that each run a whole engine have to make the same plans, so there it does.
        """
        if self._grammar_manager is None:
            self._grammar_manager = StructuredOutputManager(
                partial(load_vocabulary, self.config.model), deterministic_timing=self._needs_identical_plans
            )
        self._grammar_manager.submit(request)
        while self._needs_identical_plans and self.scheduler.is_waiting_for_grammar(request.request_id):
            self._grammar_manager.wait(_GRAMMAR_WAIT_SECONDS)
            self._apply_compiled_grammars(self._grammar_manager)

    def _apply_compiled_grammars(self, grammars: StructuredOutputManager) -> None:
        """Passes compiled grammars to their requests, or fails them; waits for a grammar if no other work is left."""
        if not self._in_flight and self.scheduler.is_waiting_for_masks:
            grammars.wait(_GRAMMAR_WAIT_SECONDS)
        for outcome in grammars.pop_results():
            if outcome.error is not None:
                self.scheduler.fail_request(outcome.request_id, outcome.error, outcome.parameter, outcome.grammar)
            elif outcome.grammar is not None:
                self.scheduler.start_grammar(outcome.request_id, outcome.grammar)

    def _launch_step(self) -> bool:
        """Schedules and launches a step; returns whether one was launched.

        While another step is in flight, an empty step is not launched: it would delay the next step with work. With no
        step in flight it is, because it delivers pending outputs.
        """
        plan = self.scheduler.schedule_unless_empty() if self._in_flight else self.scheduler.schedule()
        if plan is None:
            return False
        try:
            if self._lora_manager is not None and (errors := self._lora_manager.load_for_step(plan)):
                self._row_errors[plan.step] = errors
            future = self._executor.execute_model(plan)
        except Exception as e:
            self._fatal_error = e
            raise EngineDeadError(f"Step {plan.step} could not start: {type(e).__name__}: {e}") from e
        self._in_flight.append((plan, future))
        return True

    def _collect_step(self) -> EngineCoreOutputs:
        plan, future = self._in_flight.popleft()
        try:
            output = future.result()
        except Exception as e:
            self._fatal_error = e
            raise EngineDeadError(f"Step {plan.step} failed: {type(e).__name__}: {e}") from e
        if errors := self._row_errors.pop(plan.step, None):
            output.errors.update(errors)
        outputs = self.scheduler.update_from_output(plan, output)
        outputs.weight_version = self._weights.version
        if self._grammar_manager is not None:
            self._grammar_manager.compute_deferred_masks()
        if self._in_flight and self._in_flight[0][0].masks_follow:
            self._send_masks(self._in_flight[0][0])
        return outputs

    def _send_masks(self, plan: SchedulerOutput) -> None:
        """Sends the masks of a launched step, which depend on the tokens collected last, so that workers sample it."""
        try:
            self._executor.sample_tokens(plan.step, *self.scheduler.masks_for(plan))
        except Exception as e:
            self._fatal_error = e
            raise EngineDeadError(f"Step {plan.step} could not be sampled: {type(e).__name__}: {e}") from e

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

"""The engine core's methods for reinforcement learning: pause, weight updates, calls of the workers.

    RUNNING ──pause wait──> DRAINING ──last request ends──> PAUSED
       ^  └──pause keep, pause abort, start_weight_update──────^ │
       └──────────────resume, or finish_weight_update────────────┘

A pause takes effect between two steps, so weights are never written while a step reads them, and all tokens of a step
come from one version.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import msgspec

from mvllm.engine.core.sleep import KV_CACHE, WEIGHTS
from mvllm.errors import EngineSleepingError, RequestError
from mvllm.messages.weights import WeightTransferInfo, WeightUpdate

if TYPE_CHECKING:
    from mvllm.engine.core.weight_updates import WeightUpdateManager
    from mvllm.executor.interface import Executor
    from mvllm.messages.requests import EngineCoreOutput
    from mvllm.scheduler.scheduler import Scheduler
    from mvllm.structured_output.structured_output_manager import StructuredOutputManager

PAUSE_MODES = ("abort", "wait", "keep")


class PauseState(enum.Enum):
    """Whether steps are scheduled: DRAINING runs the present requests to their end, PAUSED runs none."""

    RUNNING = enum.auto()
    DRAINING = enum.auto()
    PAUSED = enum.auto()


class CoreRollouts(ABC):
    """Base of EngineCore, which has the scheduler, the executor and the steps in flight."""

    scheduler: Scheduler
    _executor: Executor
    _grammar_manager: StructuredOutputManager | None
    _released_memory: tuple[str, ...]
    _pause: PauseState
    _weights: WeightUpdateManager
    _clears_cache_when_drained = False
    _resumes_after_update = False

    @abstractmethod
    def _collect_all_steps(self) -> None:
        """Waits for the steps in flight and processes their results."""

    @abstractmethod
    def _hold_outputs(self, outputs: list[EngineCoreOutput]) -> None:
        """Keeps outputs until the next step's."""

    @abstractmethod
    def _add_held_requests(self) -> None:
        """Adds the requests that came while the engine was paused."""

    @abstractmethod
    def _fail_all_requests(self, message: str) -> None:
        """Ends all requests with an error."""

    @property
    @abstractmethod
    def _has_steps_in_flight(self) -> bool:
        """Whether results of steps have not been collected."""

    def pause_scheduler(self, mode: str, clear_cache: bool) -> bool:
        """Stops scheduling. Requests that come meanwhile wait.

        Args:
            mode: `abort` ends all requests with the outputs so far. `wait` lets them finish first, see
                `is_scheduler_paused`. `keep` stops them at the end of the step in flight; `resume_scheduler` continues
                them.
            clear_cache: Drop the prefix cache. With `keep`, the requests' own keys and values, too: they are computed
                again. Not before `wait` has ended.

        Returns:
            Whether the scheduler is paused now.
        """
        if mode not in PAUSE_MODES:
            raise RequestError(f"mode must be one of {', '.join(PAUSE_MODES)}, not {mode!r:.40}.", parameter="mode")
        self._clears_cache_when_drained = clear_cache
        self._resumes_after_update = False
        if mode == "wait" and self._pause is not PauseState.PAUSED:
            self._pause = PauseState.DRAINING
            return self.is_scheduler_paused()
        self._collect_all_steps()
        if mode == "abort":
            ids = self.scheduler.request_ids
            self.scheduler.finish_aborted()
            if self._grammar_manager is not None:
                self._grammar_manager.cancel(ids)
            self._hold_outputs(self.scheduler.pop_outputs())
        self._pause_now(clear_cache)
        return True

    def is_scheduler_paused(self) -> bool:
        """Whether no step runs until `resume_scheduler`, or until the end of a weight update."""
        if self._pause is PauseState.DRAINING and not (self._has_steps_in_flight or self.scheduler.has_requests()):
            self._pause_now(self._clears_cache_when_drained)
        return self._pause is PauseState.PAUSED

    def is_scheduler_running(self) -> bool:
        """Whether the scheduler neither is paused nor will be when the present requests have finished."""
        return self._pause is PauseState.RUNNING

    def _pause_now(self, clear_cache: bool) -> None:
        self._pause = PauseState.PAUSED
        self._add_held_requests()
        if clear_cache:
            self.scheduler.forget_computed(restart=True)

    def resume_scheduler(self) -> None:
        """Continues scheduling.

        Raises:
            RequestError: A weight update is under way.
            EngineSleepingError: The weights are unusable.
        """
        self._weights.check_usable()
        if self._weights.is_open:
            raise RequestError("A weight update is under way. Finish it before resuming.")
        self._resumes_after_update = False
        self._pause = PauseState.RUNNING
        self._add_held_requests()

    def init_weight_transfer(self, info: WeightTransferInfo) -> None:
        """Lets the workers begin to join the process group of a trainer; steps run on, see
        `has_joined_weight_transfer`.

        Raises:
            RequestError: An earlier call still waits for its trainer.
        """
        self._weights.join_group(info)

    def has_joined_weight_transfer(self, give_up: bool) -> bool:
        """Whether all workers have joined the group of `init_weight_transfer`.

        Args:
            give_up: Stop waiting.

        Raises:
            RequestError: The group cannot be joined, or its timeout has passed.
        """
        return self._weights.has_joined_group(give_up=give_up)

    def start_weight_update(self) -> None:
        """Pauses the scheduler at the end of the step in flight, and begins a weight update.

        Raises:
            RequestError: One is under way.
            EngineSleepingError: The weights sleep.
            PlatformError: The platform's worker does not support it.
        """
        if WEIGHTS in self._released_memory:
            raise EngineSleepingError("The weights sleep. Wake them up (wake_up) before updating them.")
        self._collect_all_steps()
        self._weights.start()
        if self._pause is PauseState.RUNNING:
            self._resumes_after_update = True
        self._pause = PauseState.PAUSED
        self._add_held_requests()

    def update_weights(self, update: WeightUpdate) -> None:
        """Loads a part of the weights, see WeightUpdateManager. Without an open update, it is one of its own."""
        is_own = not self._weights.is_open
        if is_own:
            self.start_weight_update()
            update = msgspec.structs.replace(update, is_only_part=True)
        try:
            self._weights.update(update)
            if is_own:
                self.finish_weight_update()
        except BaseException:
            if is_own and self._weights.is_open:
                self.abandon_weight_update()
            self._fail_requests_of_unusable_weights()
            raise

    def finish_weight_update(self, version: int | None = None, reset_running_requests: bool = False) -> int:
        """Ends a weight update, drops the prefix cache, and resumes if `start_weight_update` has paused.

        Args:
            version: The new version of the weights; None for one more than the last.
            reset_running_requests: Compute the keys and values of running requests again, with the new weights.
                Otherwise they continue with those of the old ones, which no other request then shares.

        Returns:
            The new version.
        """
        old = self._weights.version
        try:
            # While the KV cache sleeps no step can run; `wake_up` warms up.
            self._weights.finish(version, warms_up=KV_CACHE not in self._released_memory)
        except BaseException:
            self._fail_requests_of_unusable_weights()
            raise
        self.scheduler.close_weight_version(old)
        self.scheduler.forget_computed(restart=reset_running_requests)
        if self._resumes_after_update:
            self.resume_scheduler()
        return self._weights.version

    def abandon_weight_update(self) -> None:
        """Ends a weight update without its remaining parts; if some were written, the weights are unusable."""
        self._weights.abandon()
        if self._weights.failure is None:
            if self._resumes_after_update:
                self.resume_scheduler()
            return
        self._fail_requests_of_unusable_weights()

    def weight_info(self) -> dict[str, Any]:
        """The version of the weights, whether an update is under way, and why they are unusable, if they are."""
        weights = self._weights
        return {"weight_version": weights.version, "is_updating": weights.is_open, "failure": weights.failure}

    def call_workers(self, method: str, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Calls a method of `worker_extension_cls` on every worker; returns the results in rank order."""
        self._collect_all_steps()
        return self._executor.collective_rpc("call_extension", (method, args, kwargs))

    def _weights_reloaded(self) -> None:
        """Follows the workers, which have read the checkpoint again: weights that were unusable are not any more."""
        self._weights.reloaded()
        self.scheduler.restore_root()
        if self._resumes_after_update:  # paused by an update that has failed
            self.resume_scheduler()

    def _fail_requests_of_unusable_weights(self) -> None:
        if self._weights.failure is not None:
            self._fail_all_requests(self._weights.failure)

"""The pause of an engine core, between two steps.

RUNNING ──pause wait──> DRAINING ──last request ends──> PAUSED
   ^  └──pause keep, pause abort, weight update────────────^ │
   └──────────────resume, or the end of the update───────────┘
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection

from mvllm.engine.core.answers import answers
from mvllm.engine.core.grammars import Grammars
from mvllm.engine.core.step_pipeline import StepPipeline
from mvllm.errors import MvllmError, RequestError
from mvllm.messages.commands import IsSchedulerPaused, IsSchedulerRunning, PauseScheduler, ResumeScheduler
from mvllm.messages.requests import EngineCoreOutput, EngineCoreRequest, FinishReason
from mvllm.scheduler.scheduler import Scheduler

PAUSE_MODES = ("abort", "wait", "keep")


class PauseState(enum.Enum):
    """Whether steps are scheduled: DRAINING runs the present requests to their end, PAUSED runs none."""

    RUNNING = enum.auto()
    DRAINING = enum.auto()
    PAUSED = enum.auto()


class Pause:
    """Stops and continues scheduling. Requests that come while the engine drains are held.

    Args:
        scheduler, steps, grammars: Those of the engine core.
        check_can_resume: Raises an MvllmError if steps must not run.
        add_request: Queues a request that was held.

    Attributes:
        state: Whether steps are scheduled.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        steps: StepPipeline,
        grammars: Grammars,
        check_can_resume: Callable[[], None],
        add_request: Callable[[EngineCoreRequest], None],
    ) -> None:
        self._scheduler = scheduler
        self._steps = steps
        self._grammars = grammars
        self._check_can_resume = check_can_resume
        self._add_request = add_request
        self.state = PauseState.RUNNING
        self._held: list[EngineCoreRequest] = []
        self._clears_cache_when_drained = False
        self._ends_with_update = False

    # --- commands

    @answers(PauseScheduler)
    def pause(self, mode: str, clear_cache: bool) -> bool:
        """Stops scheduling. Requests that come meanwhile wait. Not before `wait` has ended is the cache dropped.

        Raises:
            RequestError: There is no such mode.
        """
        if mode not in PAUSE_MODES:
            raise RequestError(f"mode must be one of {', '.join(PAUSE_MODES)}, not {mode!r:.40}.", parameter="mode")
        self._clears_cache_when_drained = clear_cache
        self._ends_with_update = False
        if mode == "wait" and self.state is not PauseState.PAUSED:
            self.state = PauseState.DRAINING
            return self.is_paused()
        self._steps.collect_all()
        if mode == "abort":
            ids = self._scheduler.request_ids
            self._scheduler.finish_aborted()
            self._grammars.cancel(ids)
            self._steps.hold(self._scheduler.pop_outputs())
        self._pause_now(clear_cache)
        return True

    @answers(IsSchedulerPaused)
    def is_paused(self) -> bool:
        """Whether no step runs until `resume`, or until the end of a weight update. Ends the draining if it is over."""
        if self.state is PauseState.DRAINING and not (self._steps.num_in_flight or self._scheduler.has_requests()):
            self._pause_now(self._clears_cache_when_drained)
        return self.state is PauseState.PAUSED

    @answers(IsSchedulerRunning)
    def is_running(self) -> bool:
        """Whether the scheduler neither is paused nor will be when the present requests have finished."""
        return self.state is PauseState.RUNNING

    @answers(ResumeScheduler)
    def resume(self) -> None:
        """Continues scheduling.

        Raises:
            RequestError: A weight update is under way.
            EngineSleepingError: The weights are unusable.
        """
        self._check_can_resume()
        self._ends_with_update = False
        self.state = PauseState.RUNNING
        self._add_held()

    # --- for the other parts of the engine core

    def begin_update(self) -> None:
        """Pauses for a weight update, which begins when no step is in flight."""
        if self.state is PauseState.RUNNING:
            self._ends_with_update = True
        self.state = PauseState.PAUSED
        self._add_held()

    def end_update(self) -> None:
        """Resumes if `begin_update` has paused.

        Raises:
            As `resume`.
        """
        if self._ends_with_update:
            self.resume()

    def hold(self, request: EngineCoreRequest) -> bool:
        """Whether a new request is held, because the engine drains."""
        if self.state is not PauseState.DRAINING:
            return False
        self._held.append(request)
        return True

    def drop_held(self, request_ids: Collection[str] | None = None) -> list[str]:
        """Drops held requests, all or those with the ids. Returns the ids of what was dropped."""
        dropped = [r.request_id for r in self._held if request_ids is None or r.request_id in request_ids]
        if dropped:
            self._held = [request for request in self._held if request.request_id not in dropped]
        return dropped

    def _pause_now(self, clear_cache: bool) -> None:
        self.state = PauseState.PAUSED
        self._add_held()
        if clear_cache:
            self._scheduler.forget_computed(restart=True)

    def _add_held(self) -> None:
        held, self._held = self._held, []
        for request in held:
            try:
                self._add_request(request)
            except MvllmError as e:
                self._steps.hold([EngineCoreOutput(request.request_id, [], FinishReason.ERROR, error=str(e))])

"""Steps of an engine core between their launch and the collection of their results.

With asynchronous scheduling, or with pipeline stages, steps are launched before earlier ones are collected. Nothing
else differs. With asynchronous scheduling, two steps are in flight while the engine core waits:

    engine core   launch N+1 │ wait for the result of N     │ collect N │ launch N+2 │ wait for N+1
    device        N ────────────────────────────────────────┤ N+1 ───────────────────────────────────
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from mvllm.errors import EngineDeadError
from mvllm.executor.interface import Executor
from mvllm.messages.requests import EngineCoreOutput, EngineCoreOutputs
from mvllm.messages.scheduler_output import ModelRunnerOutput, SchedulerOutput
from mvllm.scheduler.scheduler import Scheduler


class MaskComputer(Protocol):
    """What computes masks when the tokens before them are known: Grammars."""

    def compute_deferred_masks(self) -> None:
        """Computes them, after a step was collected."""


class StepPipeline:
    """Launches steps and collects their results, in order.

    Args:
        scheduler: Plans the steps.
        executor: Runs them.
        num_stages: Pipeline stages of the model. One step per stage fills a pipeline; more would only queue up, also
            with asynchronous scheduling.
        is_async: Whether a step is launched before the one before it is collected.
        masks: Computed after each collected step.
        weight_version: Returns the version of the weights.
        load_adapters: Loads the adapters of a plan; returns errors by position in its batch.

    Attributes:
        max_in_flight: Most steps in flight.
        failure: What ended the engine, or None.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        num_stages: int,
        is_async: bool,
        masks: MaskComputer,
        weight_version: Callable[[], int],
        load_adapters: Callable[[SchedulerOutput], dict[int, str]] | None,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._masks = masks
        self._weight_version = weight_version
        self._load_adapters = load_adapters
        self._in_flight: deque[tuple[SchedulerOutput, Future[ModelRunnerOutput]]] = deque()
        self._row_errors: dict[int, dict[int, str]] = {}  # step -> position in its batch -> error of the row
        self._held: deque[EngineCoreOutputs] = deque()
        self.max_in_flight = max_steps_in_flight(num_stages, is_async=is_async)
        self.failure: BaseException | None = None

    @property
    def num_in_flight(self) -> int:
        """Steps that were launched and not collected."""
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        """Whether steps are in flight, or outputs are held."""
        return bool(self._in_flight or self._held)

    @property
    def next_step(self) -> int:
        """The number of the step that is collected next."""
        return self._in_flight[0][0].step if self._in_flight else self._scheduler.next_step

    def launch(self) -> bool:
        """Schedules and launches a step; returns whether one was launched.

        While another step is in flight, an empty step is not launched: it would delay the next step with work. With no
        step in flight it is, because it delivers pending outputs.

        Raises:
            EngineDeadError: It could not be started.
        """
        plan = self._scheduler.schedule_unless_empty() if self._in_flight else self._scheduler.schedule()
        if plan is None:
            return False
        try:
            if self._load_adapters is not None and (errors := self._load_adapters(plan)):
                self._row_errors[plan.step] = errors
            future = self._executor.execute_model(plan)
        except Exception as e:
            raise self._fail(f"Step {plan.step} could not start: {type(e).__name__}: {e}", e) from e
        self._in_flight.append((plan, future))
        return True

    def collect(self) -> EngineCoreOutputs:
        """Waits for the oldest step in flight, and applies its results.

        Raises:
            EngineDeadError: It failed as a whole.
        """
        plan, future = self._in_flight.popleft()
        try:
            output = future.result()
        except Exception as e:
            raise self._fail(f"Step {plan.step} failed: {type(e).__name__}: {e}", e) from e
        if errors := self._row_errors.pop(plan.step, None):
            output.errors.update(errors)
        outputs = self._scheduler.update_from_output(plan, output)
        outputs.weight_version = self._weight_version()
        self._masks.compute_deferred_masks()
        if self._in_flight and self._in_flight[0][0].masks_follow:
            self._send_masks(self._in_flight[0][0])
        return outputs

    def collect_all(self) -> None:
        """Waits for the steps in flight. Their outputs are held.

        Raises:
            EngineDeadError: One failed as a whole.
        """
        while self._in_flight:
            self.hold(self.collect().outputs)

    def hold(self, outputs: list[EngineCoreOutput]) -> None:
        """Keeps outputs for `pop_held`."""
        if outputs:
            self._held.append(EngineCoreOutputs(outputs, weight_version=self._weight_version()))

    def pop_held(self) -> EngineCoreOutputs | None:
        """The oldest of the held outputs, which leave; None if there are none."""
        return self._held.popleft() if self._held else None

    def _send_masks(self, plan: SchedulerOutput) -> None:
        """Sends the masks of a launched step, which depend on the tokens collected last, so that workers sample it."""
        try:
            self._executor.sample_tokens(plan.step, *self._scheduler.masks_for(plan))
        except Exception as e:
            raise self._fail(f"Step {plan.step} could not be sampled: {type(e).__name__}: {e}", e) from e

    def _fail(self, message: str, cause: Exception) -> EngineDeadError:
        self.failure = cause
        return EngineDeadError(message)


def max_steps_in_flight(num_stages: int, *, is_async: bool) -> int:
    """Most steps in flight, see StepPipeline."""
    return num_stages if num_stages > 1 else 2 if is_async else 1

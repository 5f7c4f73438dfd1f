"""Steps of a worker in this process, whose output may be fetched later than the step is started."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from mvllm.messages.scheduler_output import ModelRunnerOutput, SchedulerOutput
from mvllm.worker.worker_wrapper import WorkerWrapper


def start_step(
    worker: WorkerWrapper, plan: SchedulerOutput, *, output_is_complete: bool = True
) -> Future[ModelRunnerOutput]:
    """Calls `execute_model`. Errors are raised by the future.

    Args:
        worker: Runs or submits the step.
        plan: The step.
        output_is_complete: The output that comes at once, if one does, is all there is; see `collect_output`.
    """
    future: Future[ModelRunnerOutput] = Future()
    try:
        output = worker.execute_model(plan)
    except Exception as e:  # noqa: BLE001  (stored; raised where the result is asked for)
        future.set_exception(e)
        return future
    if output is None or not output_is_complete:
        return DeferredOutputFuture(lambda: worker.call("collect_output", plan.step))
    future.set_result(output)
    return future


def finish_step(
    worker: WorkerWrapper,
    future: Future[ModelRunnerOutput],
    step: int,
    mask_rows: list[int],
    token_masks: bytes,
) -> None:
    """Calls `sample_tokens` for a step that `start_step` has begun, and settles its future if the output is there."""
    if future.done():  # it has failed
        return
    try:
        output = worker.sample_tokens(step, mask_rows, token_masks)
    except Exception as e:  # noqa: BLE001  (stored; raised where the result is asked for)
        future.set_exception(e)
        return
    if output is not None:
        future.set_result(output)


class DeferredOutputFuture(Future[ModelRunnerOutput]):
    """Fetched when asked for, in the caller's thread: steps launched meanwhile run beside.

    Args:
        fetch: Waits for the output.
    """

    def __init__(self, fetch: Callable[[], ModelRunnerOutput]) -> None:
        super().__init__()
        self._fetch = fetch

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        """The output. There is no waiting with a limit: the work is done by this call."""
        self._resolve()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What `result` would raise, or None."""
        self._resolve()
        return super().exception(timeout)

    def _resolve(self) -> None:
        if self.done():
            return
        try:
            self.set_result(self._fetch())
        except Exception as e:  # noqa: BLE001  (stored; raised where the result is asked for)
            self.set_exception(e)

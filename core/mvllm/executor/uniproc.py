"""Executors that run one worker in the process of the engine core: `uni`, and the base of `external_launcher`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from mvllm.config.engine_config import EngineConfig
from mvllm.executor.interface import Executor
from mvllm.executor.worker_topology import devices_per_worker
from mvllm.messages.scheduler_output import ModelRunnerOutput, SchedulerOutput
from mvllm.platform.interface import Platform
from mvllm.platform.topology import WorkerContext
from mvllm.worker.worker_wrapper import WorkerWrapper

T = TypeVar("T")


class InProcessExecutor(Executor):
    """Calls one worker directly.

    Args:
        config: The engine's configuration.
        platform: The platform of its worker.
        ctx: Rank and launch settings of the worker.
        output_is_complete: Whether an output that `execute_model` of the worker returns at once is the whole output.
            Otherwise `collect_output` is called for the rest.
    """

    has_local_worker = True

    def __init__(
        self, config: EngineConfig, platform: Platform, ctx: WorkerContext, *, output_is_complete: bool = True
    ) -> None:
        super().__init__(config, platform)
        self._rank = ctx.rank
        self._output_is_complete = output_is_complete
        self._worker = WorkerWrapper(config, platform, ctx)
        self._started_step: Future[ModelRunnerOutput] | None = None

    def collective_rpc(  # type: ignore[override]
        self,
        method: str,
        args: tuple[Any, ...] = (),
        *,
        timeout: float | None = None,
        ranks: Sequence[int] | None = None,
        non_block: bool = False,
    ) -> list[Any] | Future[list[Any]]:
        def call() -> list[Any]:
            return [self._worker.call(method, *args)] if ranks is None or self._rank in ranks else []

        return finished(call) if non_block else call()

    def apply_model(self, function: Callable[[Any], T]) -> list[T]:
        return [function(self._worker.model)]

    def execute_model(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Runs one step, or submits it where the worker returns its output later. Errors are raised by the future."""
        future: Future[ModelRunnerOutput] = Future()
        try:
            output = self._worker.execute_model(plan)
        except Exception as e:  # noqa: BLE001  (stored; raised where the result is requested)
            future.set_exception(e)
        else:
            if output is None or not self._output_is_complete:
                future = DeferredOutputFuture(lambda: self._worker.call("collect_output", plan.step))
            else:
                future.set_result(output)
        self._started_step = future
        return future

    def can_sample_later(self) -> bool:
        return self._worker.can_sample_later

    def sample_tokens(self, step: int, mask_rows: list[int], token_masks: bytes) -> None:
        future = self._started_step
        assert future is not None, "execute_model comes first"
        if future.done():  # it has failed
            return
        try:
            output = self._worker.sample_tokens(step, mask_rows, token_masks)
        except Exception as e:  # noqa: BLE001  (stored; raised where the result is requested)
            future.set_exception(e)
            return
        if output is not None:
            future.set_result(output)

    def shutdown(self) -> None:
        """Shuts the worker down, which leaves the process groups that it has joined."""
        self._worker.shutdown()


class UniProcExecutor(InProcessExecutor):
    """Runs the only worker of its engine."""

    def __init__(self, config: EngineConfig, platform: Platform) -> None:
        parallel = config.parallel
        ctx = WorkerContext(
            local_rank=parallel.data_parallel_rank,
            local_world_size=parallel.data_parallel_size,
            seed=config.model.seed,
            num_devices=devices_per_worker(parallel, 1),
        )
        super().__init__(config, platform, ctx)


def finished(call: Callable[[], T]) -> Future[T]:
    """A future that holds the result of `call`, which is called now, or its error."""
    future: Future[T] = Future()
    try:
        future.set_result(call())
    except Exception as e:  # noqa: BLE001  (stored; raised where the result is requested)
        future.set_exception(e)
    return future


class DeferredOutputFuture(Future[ModelRunnerOutput]):
    """The output of a submitted step, fetched by the thread that asks for it. Later steps can be submitted first.

    Args:
        fetch: Waits for the output.
    """

    def __init__(self, fetch: Callable[[], ModelRunnerOutput]) -> None:
        super().__init__()
        self._fetch = fetch

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        """The output. `timeout` has no effect: this call does the work."""
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
        except Exception as e:  # noqa: BLE001  (stored; raised where the result is requested)
            self.set_exception(e)

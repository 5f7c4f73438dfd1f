"""One worker, in the engine core's own process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from mvllm.config.engine_config import EngineConfig
from mvllm.executor.deferred_output import finish_step, start_step
from mvllm.executor.interface import Executor
from mvllm.executor.worker_topology import devices_per_worker
from mvllm.messages.scheduler_output import ModelRunnerOutput, SchedulerOutput
from mvllm.platform.interface import Platform
from mvllm.platform.topology import WorkerContext
from mvllm.worker.worker_wrapper import WorkerWrapper

T = TypeVar("T")


class InProcessExecutor(Executor):
    """Calls its one worker directly, and answers for that worker alone.

    Args:
        config: The engine's configuration.
        platform: Where its worker runs.
        ctx: Which worker this is.
    """

    def __init__(self, config: EngineConfig, platform: Platform, ctx: WorkerContext) -> None:
        super().__init__(config, platform)
        self._rank = ctx.rank
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

    def execute_model(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Runs one step, or submits it where the worker gives its output later. Errors are raised by the future."""
        self._started_step = start_step(self._worker, plan)
        return self._started_step

    def can_sample_later(self) -> bool:
        return self._worker.can_sample_later

    def sample_tokens(self, step: int, mask_rows: list[int], token_masks: bytes) -> None:
        assert self._started_step is not None, "execute_model comes first"
        finish_step(self._worker, self._started_step, step, mask_rows, token_masks)

    def shutdown(self) -> None:
        """Ends the worker, which leaves the groups that it joined and no others."""
        self._worker.shutdown()


class UniProcExecutor(InProcessExecutor):
    """The only worker of its engine."""

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
    """Makes the call now; its result, or its error, is there when the future is asked for it."""
    future: Future[T] = Future()
    try:
        future.set_result(call())
    except Exception as e:  # noqa: BLE001  (stored; raised where the result is asked for)
        future.set_exception(e)
    return future

"""One worker, in the engine core's own process."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from mvllm.config.engine_config import EngineConfig
from mvllm.executor.interface import Executor
from mvllm.executor.late_output import start_step
from mvllm.messages.scheduler_output import ModelRunnerOutput, SchedulerOutput
from mvllm.platform.interface import Platform
from mvllm.platform.topology import WorkerContext
from mvllm.worker.wrapper import WorkerWrapper


class UniProcExecutor(Executor):
    """Calls its worker directly. A step has run when `execute_model` returns, or has been submitted where the worker
    gives its output later. Errors are raised by the future.
    """

    def __init__(self, config: EngineConfig, platform: Platform) -> None:
        super().__init__(config, platform)
        self._worker = WorkerWrapper(config, platform, WorkerContext(seed=config.model.seed))

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
            return [self._worker.call(method, *args)] if ranks is None or 0 in ranks else []

        return _finished(call) if non_block else call()

    def execute_model(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        return start_step(self._worker, plan)

    def shutdown(self) -> None:
        self._worker.shutdown()


def _finished(call: Any) -> Future[Any]:
    future: Future[Any] = Future()
    try:
        future.set_result(call())
    except Exception as e:  # noqa: BLE001  (stored; raised where the result is asked for)
        future.set_exception(e)
    return future

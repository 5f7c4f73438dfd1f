"""An executor with several workers as threads of this process, on one core, with the same call semantics as processes.

LLM(..., distributed_executor_backend="tests.helpers.thread_executor.ThreadExecutor")
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from mvllm.executor.interface import Executor
from mvllm.platform.phases import Phase, enter_phase
from mvllm.platform.topology import WorkerContext
from mvllm.worker.worker_wrapper import WorkerWrapper
from tests.helpers.thread_ranks import ThreadCommunicator, _ThreadRendezvous


class ThreadGroupPlatform:
    """A platform whose ranks are threads of this process."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform
        self._rendezvous_by_group: dict[tuple[str, tuple[int, ...]], _ThreadRendezvous] = {}
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def communicator(self, group: Any, device: Any) -> ThreadCommunicator:
        with self._lock:
            meeting = self._rendezvous_by_group.setdefault(
                (group.name, group.ranks), _ThreadRendezvous(len(group.ranks))
            )
        return ThreadCommunicator(meeting, group.rank_in_group, len(group.ranks))


def _log_error(future: Future[Any]) -> None:
    """Logs the error of a rank. That of a rank that does not answer is the cause of the answering rank's."""
    if not future.cancelled() and (error := future.exception()) is not None:
        logging.getLogger(__name__).error("A rank failed", exc_info=error)


class ThreadExecutor(Executor):
    """Calls reach every worker in order; only the first rank of the last stage answers a step."""

    max_in_flight = 0
    """Most steps in flight at once, over all executors of this class."""

    def __init__(self, config: Any, platform: Any) -> None:
        super().__init__(config, platform)
        with enter_phase(Phase.ENGINE):
            size = platform.topology(config.parallel).num_workers
        num_devices = config.parallel.world_size // size
        shared = ThreadGroupPlatform(platform)
        self._answering = size - config.parallel.tensor_parallel_size // num_devices
        self._threads = [ThreadPoolExecutor(1) for _ in range(size)]
        self._workers = [
            WorkerWrapper(
                config,
                shared,  # type: ignore[arg-type]
                WorkerContext(
                    *(rank, rank, size, size),
                    seed=config.model.seed,
                    init_method="tcp://nowhere:1",
                    num_devices=num_devices,
                ),
            )
            for rank in range(size)
        ]
        self._under_way: list[Future[Any]] = []

    def collective_rpc(  # type: ignore[override]
        self,
        method: str,
        args: tuple[Any, ...] = (),
        *,
        timeout: float | None = None,
        ranks: Sequence[int] | None = None,
        non_block: bool = False,
    ) -> list[Any]:
        futures = [thread.submit(worker.call, method, *args) for thread, worker in zip(self._threads, self._workers)]
        return [future.result(timeout=120) for future in futures]

    def execute_model(self, plan: Any) -> Future[Any]:
        futures = [thread.submit(worker.execute_model, plan) for thread, worker in zip(self._threads, self._workers)]
        for future in futures:
            future.add_done_callback(_log_error)
        if plan.has_host_copies:  # every rank answers; here, the answering rank does so last
            wait(futures)
        self._under_way = [future for future in [*self._under_way, futures[self._answering]] if not future.done()]
        ThreadExecutor.max_in_flight = max(ThreadExecutor.max_in_flight, len(self._under_way))
        return futures[self._answering]

    def shutdown(self) -> None:
        for thread, worker in zip(self._threads, self._workers):
            thread.submit(worker.shutdown).result(timeout=60)
            thread.shutdown()

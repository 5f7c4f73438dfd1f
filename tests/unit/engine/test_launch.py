"""The time limit of a process' start, and the failure of one process among several that start together."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from mvllm.config.engine_config import ParallelConfig
from mvllm.engine.process.launch import failing_together, start_timeout_seconds
from mvllm.executor.worker_group import WorkerGroup


class Starting(WorkerGroup[Any]):
    """A process that never becomes ready."""

    is_ended = False

    @property
    def workers(self) -> Sequence[Any]:
        return [SimpleNamespace(is_ready=False, activity=SimpleNamespace(seconds=0.0))]

    def terminate(self, *, gracefully: bool = False) -> None:
        self.is_ended = True

    def launch(self) -> None: ...
    def _run_monitor(self) -> None: ...
    def _request_exit(self) -> None: ...
    def _kill(self) -> None: ...

    def close(self) -> None:
        self.stop.close()


def test_the_time_limit_of_a_core_without_worker_processes_is_start_timeout() -> None:
    assert start_timeout_seconds(ParallelConfig(start_timeout=8.0, data_parallel_size=2)) == 8.0
    assert start_timeout_seconds(ParallelConfig(start_timeout=8.0, tensor_parallel_size=2)) > 8.0


def test_a_wait_for_one_process_raises_the_failure_of_another() -> None:
    first, second = Starting(), Starting()
    with failing_together([first, second]):
        threading.Timer(0.05, lambda: second.fail(RuntimeError("EngineCore_DP1 was killed"))).start()
        with pytest.raises(RuntimeError, match="EngineCore_DP1 was killed"):
            first.wait_ready(600.0)
    third, fourth = Starting(), Starting()
    with failing_together([third, fourth]):
        pass
    fourth.fail(RuntimeError("later"))
    assert third.failure is None
    for group in (first, second, third, fourth):
        group.close()

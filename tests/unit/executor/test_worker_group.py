"""Which worker an error names first, where one waits for another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from mvllm.errors import WorkerError, WorkerStuckError
from mvllm.executor.process.activity_table import Activity
from mvllm.executor.worker_group import WorkerGroup


class Worker:
    """A worker that does nothing."""

    def __init__(self, rank: int, *, is_stopped: bool = False) -> None:
        self.name, self.rank, self.pid = f"Worker_TP{rank}", rank, 100 + rank
        self.is_ready, self.is_stopped = True, is_stopped
        self.activity = Activity("execute_model", request_id=1, step=3, seconds=1.0)

    def __str__(self) -> str:
        return f"{self.name} (rank {self.rank}, pid {self.pid})"

    def dump_stack(self) -> str:
        return "stack"

    def stuck_error(self, message: str) -> Exception:
        return WorkerStuckError(message, rank=self.rank, pid=self.pid, activity="step")


class Group(WorkerGroup):
    def __init__(self, *workers: Worker) -> None:
        super().__init__()
        self._workers = workers
        self._cause_seconds = 0.0

    @property
    def workers(self) -> Sequence[Any]:
        return self._workers

    def terminate(self, *, gracefully: bool = False) -> None: ...

    def is_monitor_thread(self) -> bool:
        return False

    def close(self) -> None:
        self.stop.close()


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def test_a_stopped_worker_is_named_before_other_late_ones() -> None:
    group = Group(Worker(0), Worker(1), Worker(2, is_stopped=True))
    error = group.stuck_error(group.workers, 2.0, "has not finished its step")
    assert isinstance(error, WorkerStuckError) and error.rank == 2
    assert first_line(error).startswith("Worker_TP2 (rank 2, pid 102) has not finished its step within 2 s")
    assert "is stopped" in first_line(error) and "Worker_TP0" in str(error)
    group.close()


def test_a_failure_names_a_stopped_worker_before_the_one_that_waited_for_it() -> None:
    waited = WorkerError("Worker_TP0 failed in all_reduce: timeout", rank=0, pid=100, activity="all_reduce")
    group = Group(Worker(0), Worker(1, is_stopped=True))
    error = group.fail_with_root_cause(waited)
    assert isinstance(error, WorkerStuckError) and error.rank == 1 and error.__cause__ is waited
    assert first_line(error).startswith("Worker_TP1 (rank 1, pid 101) is stopped, as by SIGSTOP, in ")
    assert "Worker_TP0 failed in all_reduce: timeout" in str(error)
    group.close()


@pytest.mark.parametrize("stopped", [[], [0]], ids=["none", "itself"])
def test_a_failure_without_another_stopped_worker_is_unchanged(stopped: list[int]) -> None:
    failure = WorkerError("Worker_TP0 failed", rank=0, pid=100, activity="")
    group = Group(*(Worker(rank, is_stopped=rank in stopped) for rank in range(2)))
    assert group.fail_with_root_cause(failure) is failure
    group.close()

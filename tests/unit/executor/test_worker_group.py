"""The worker that an error names first when other workers wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from mvllm.errors import EngineDeadError, WorkerError, WorkerStuckError
from mvllm.executor.process.activity_table import ActivityTable
from mvllm.executor.worker_group import WorkerGroup
from mvllm.executor.worker_handle import WorkerHandle


class Worker(WorkerHandle):
    """A worker in the middle of a step, without a process."""

    def __init__(self, rank: int, activity_table: ActivityTable, *, is_stopped: bool = False) -> None:
        super().__init__(f"Worker_TP{rank}", rank, 100 + rank, activity_table, -1)
        activity_table.write(rank, "execute_model", request_id=1, step=3)
        self._is_stopped = is_stopped

    @property
    def is_running(self) -> bool:
        return False

    @property
    def is_stopped(self) -> bool:
        return self._is_stopped

    def dump_stack(self) -> str:
        return "stack"

    def describe_exit(self) -> str:
        return f"{self} has ended."


class Group(WorkerGroup[Worker]):
    def __init__(self, *, size: int, stopped: Sequence[int] = ()) -> None:
        self._activity_table = ActivityTable.create(size)
        super().__init__([Worker(rank, self._activity_table, is_stopped=rank in stopped) for rank in range(size)])
        self._death_report_seconds = 0.0

    def launch(self) -> None: ...
    def _run_monitor(self) -> None: ...
    def _request_exit(self) -> None: ...
    def _kill(self) -> None: ...
    def _release(self) -> None:
        self._activity_table.close()


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def test_a_stopped_worker_is_named_first_among_late_ones() -> None:
    group = Group(size=3, stopped=[2])
    error = group.stuck_error(group.workers, 2.0, "has not finished its step")
    assert isinstance(error, WorkerStuckError) and error.rank == 2
    assert first_line(error).startswith("Worker_TP2 (rank 2, pid 102) has not finished its step within 2 s")
    assert "is stopped" in first_line(error) and "Worker_TP0" in str(error)
    group.close()


def test_the_end_of_a_group_ends_the_wait_for_its_start() -> None:
    group = Group(size=1)
    threading.Timer(0.02, group.expect_exits).start()
    started = time.monotonic()
    with pytest.raises(EngineDeadError, match="was ended while it started"):
        group.wait_ready(300.0)
    assert time.monotonic() - started < 120.0


def test_a_failure_while_another_worker_is_stopped_names_the_stopped_one_first() -> None:
    waited = WorkerError("Worker_TP0 failed in all_reduce: timeout", rank=0, pid=100, activity="all_reduce")
    group = Group(size=2, stopped=[1])
    error = group.fail_with_root_cause(waited)
    assert isinstance(error, WorkerStuckError) and error.rank == 1 and error.__cause__ is waited
    assert first_line(error).startswith("Worker_TP1 (rank 1, pid 101) is stopped, as by SIGSTOP, in ")
    assert "Worker_TP0 failed in all_reduce: timeout" in str(error)
    group.close()


@pytest.mark.parametrize("stopped", [[], [0]], ids=["none", "itself"])
def test_a_failure_is_unchanged_if_no_other_worker_is_stopped(stopped: list[int]) -> None:
    failure = WorkerError("Worker_TP0 failed", rank=0, pid=100, activity="")
    group = Group(size=2, stopped=stopped)
    assert group.fail_with_root_cause(failure) is failure
    group.close()

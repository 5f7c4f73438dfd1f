"""Out-of-memory errors, and the agreement among ranks to drop a failed step."""

from __future__ import annotations

import threading

import pytest
import torch

from mvllm.distributed.group_coordinator import GroupCoordinator
from mvllm.errors import ModelError, StepMemoryError
from mvllm.plugin_api import WorkerContext
from mvllm.worker.out_of_memory import all_ranks_failed_step, step_out_of_memory_error
from mvllm_cpu.runtime import CPURuntime
from tests.helpers.thread_ranks import run_ranks
from tests.unit.engine.builders import make_config
from tests.unit.worker.builders import HostRuntime

SECONDS = 60.0
"""Timeout of answers that arrive."""


class Watched(HostRuntime):
    """A runtime that records `synchronize`, and can block in it."""

    def __init__(self, release_pages: threading.Event | None = None) -> None:
        super().__init__()
        self.release_pages, self.waited = release_pages, False

    def synchronize(self) -> None:
        if self.release_pages is not None:
            self.release_pages.wait(SECONDS)
        self.waited = True


def test_ranks_that_all_failed_in_a_step_continue_after_synchronizing() -> None:
    runtimes = [Watched() for _ in range(3)]

    def body(group: GroupCoordinator) -> list[bool]:
        return [all_ranks_failed_step(group, runtimes[group.rank_in_group], step, SECONDS) for step in (7, 9)]

    assert run_ranks(3, body) == [[True, True]] * 3
    assert all(runtime.waited for runtime in runtimes)


def test_a_rank_that_failed_in_another_step_or_not_at_all_ends_the_engine() -> None:
    def other_step(group: GroupCoordinator) -> bool:
        return all_ranks_failed_step(group, HostRuntime(), 7 + group.rank_in_group, SECONDS)

    assert run_ranks(2, other_step) == [False, False]

    def silent(group: GroupCoordinator) -> bool:
        return group.rank_in_group == 1 or all_ranks_failed_step(group, HostRuntime(), 7, 0.1)

    assert run_ranks(2, silent) == [False, True]


def test_a_device_that_does_not_synchronize_keeps_the_other_ranks_from_continuing() -> None:
    release_pages = threading.Event()
    runtimes = [Watched(), Watched(release_pages)]

    def body(group: GroupCoordinator) -> bool:
        answer = all_ranks_failed_step(group, runtimes[group.rank_in_group], 3, SECONDS if group.rank_in_group else 0.5)
        release_pages.set()
        return answer

    assert run_ranks(2, body)[0] is False


def test_a_single_rank_needs_no_agreement() -> None:
    assert all_ranks_failed_step(GroupCoordinator.single("tp"), HostRuntime(), 0, 0.0)


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("2 GiB asked for.\nand more")])
def test_errors_of_allocators_name_the_limits(error: Exception) -> None:
    reason = "2 GiB asked for" if str(error) else "MemoryError"
    with pytest.raises(StepMemoryError, match=rf"{reason}\. Lower max_num_batched_tokens \(now"):
        with step_out_of_memory_error(make_config().scheduler, HostRuntime()):
            raise error


@pytest.mark.parametrize("error", [RuntimeError("can't allocate memory"), ValueError("no"), ModelError("mine")])
def test_errors_other_than_out_of_memory_are_unchanged(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, step_out_of_memory_error(make_config().scheduler, HostRuntime()):
        raise error
    assert caught.value is error


def test_the_host_knows_the_error_of_torchs_allocator() -> None:
    runtime = CPURuntime(WorkerContext())
    with pytest.raises(StepMemoryError, match="allocate"), step_out_of_memory_error(make_config().scheduler, runtime):
        torch.empty(1 << 52, dtype=torch.uint8)
    refused = RuntimeError("[enforce fail at alloc_cpu.cpp] data. DefaultCPUAllocator: not enough memory: you tried")
    assert runtime.is_out_of_memory(refused) and not runtime.is_out_of_memory(RuntimeError("not enough values"))

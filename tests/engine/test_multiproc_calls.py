"""Calls to worker processes: the ranks that answer, the order, the time limits, and the contents of errors."""

from __future__ import annotations

import gc
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NoReturn

import pytest
from msgspec.structs import replace

from mvllm.config.engine_args import EngineArgs
from mvllm.config.engine_config import EngineConfig, replace_field
from mvllm.errors import ConfigError, EngineDeadError, PlatformError, WorkerDiedError, WorkerError, WorkerStuckError
from mvllm.executor import rpc_queues
from mvllm.executor.factory import make_executor
from mvllm.executor.message_queue import SharedMemoryError, shared_memory_space
from mvllm.executor.message_queue.ring_buffer import ShmRingBuffer
from mvllm.executor.multiproc import MultiprocExecutor
from mvllm.executor.process.child_process_group import ChildProcessGroup
from mvllm.executor.process.child_process_handle import ChildProcessHandle
from mvllm.messages.process_failure import RemoteTraceback
from mvllm.messages.scheduler_output import SchedulerOutput
from mvllm.platform.choose import choose_platform
from tests.helpers.plugins import prepend, scripted_platform_path
from tests.helpers.processes import TAG, new_tag, stop_process, tagged_processes, wait_until
from tests.helpers.scripted_worker import (
    EXIT,
    FORGE_ON_RANK_1,
    KILL,
    PRINT,
    RAISE,
    RAISE_ON_RANK,
    SLEEP_MS,
    SLEEP_ON_RANK_0_MS,
    SPAWN,
)

pytestmark = pytest.mark.fresh_programs  # the scripted workers show that core imports no torch
MakeExecutor = Callable[..., MultiprocExecutor]
SOON = 60
"""Seconds for what takes one on a machine that is not busy, and minutes by a time limit."""


@pytest.fixture
def tag(monkeypatch: pytest.MonkeyPatch) -> str:
    tag = new_tag()
    monkeypatch.setenv(TAG, tag)
    return tag


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tag: str) -> Iterator[MakeExecutor]:
    with _builder(monkeypatch, tmp_path) as build:
        yield build


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MultiprocExecutor]:
    """Two workers, for tests after which they go on."""
    with pytest.MonkeyPatch.context() as patch, _builder(patch, tmp_path_factory.mktemp("shared")) as build:
        shared = build(2)
        patch.undo()
        yield shared


@contextmanager
def _builder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[MakeExecutor]:
    prepend(monkeypatch, scripted_platform_path(folder / "scripted_worker"))
    monkeypatch.setenv("SCRIPTED_WORKER", "yes")
    with ExitStack() as stack:

        def build(num_workers: int = 1, **fields: object) -> MultiprocExecutor:
            executor = make_executor(_config(num_workers, **fields), choose_platform("scripted").platform)
            assert isinstance(executor, MultiprocExecutor)
            stack.callback(executor.shutdown)
            return executor

        yield build


def _config(num_workers: int, **fields: object) -> EngineConfig:
    config = EngineArgs.from_kwargs(model="demo").create_engine_config()
    settings = {"tensor_parallel_size": num_workers, "distributed_executor_backend": "mp", **fields}
    for name, value in settings.items():
        config = replace_field(config, f"parallel.{name}", value)
    return config


def test_all_ranks_or_only_the_named_ones_answer_in_rank_order(make: MakeExecutor) -> None:
    executor = make(3)
    assert [needs.bytes_per_token for needs in executor.kv_cache_needs()] == [1000, 1001, 1002]
    assert executor.kv_cache_needs()[0].block_sizes == (16, 32)
    pids = executor.collective_rpc("available_kv_bytes", ranks=[2, 0])
    assert pids == [executor.worker_pids[0], executor.worker_pids[2]]
    assert executor.collective_rpc("available_kv_bytes", ranks=[]) == []
    assert os.getpid() not in executor.worker_pids


def test_only_declared_methods_with_arguments_of_their_types_can_be_called(make: MakeExecutor) -> None:
    executor = make()
    with pytest.raises(ConfigError, match=r"workers offer.*check_health"):
        executor.collective_rpc("__init__")
    with pytest.raises(WorkerError, match="Expected `int`"):
        executor.collective_rpc("allocate_kv_cache", ("rm", "-rf"))
    assert executor.collective_rpc("check_health") == [None]


def test_several_steps_may_be_in_flight_and_one_rank_answers(executor: MultiprocExecutor) -> None:
    futures = [executor.execute_model(SchedulerOutput(step=step)) for step in range(5)]
    outputs = [future.result() for future in reversed(futures)]
    assert [output.step for output in outputs] == [4, 3, 2, 1, 0]
    assert all(output.sampled_token_ids == [0] for output in outputs)


def test_a_non_blocking_call_returns_a_future(make: MakeExecutor) -> None:
    executor = make()
    future = executor.collective_rpc("allocate_kv_cache", (SLEEP_MS, 3000), non_block=True)
    assert isinstance(future, Future) and not future.done()
    with pytest.raises(TimeoutError):
        future.result(0.05)
    wait_until(future.done, 60, "the future is done without anybody waiting for its result")
    assert future.result() == [None]


def test_a_timeout_names_the_worker_and_its_late_reply_is_not_taken_for_a_later_one(
    executor: MultiprocExecutor,
) -> None:
    with pytest.raises(TimeoutError, match=r"2 s from Worker_TP0 \(rank 0, pid \d+\), which is in allocate") as caught:
        executor.collective_rpc("allocate_kv_cache", (SLEEP_ON_RANK_0_MS, 5000), timeout=2.0)  # rank 1 has 2 s
    assert "Worker_TP1" not in str(caught.value)
    for _ in range(3):
        assert [needs.bytes_per_token for needs in executor.kv_cache_needs()] == [1000, 1001]


def test_a_cancelled_call_raises_its_timeout_every_time(executor: MultiprocExecutor) -> None:
    future = executor.collective_rpc("allocate_kv_cache", (SLEEP_ON_RANK_0_MS, 1000), timeout=0.2, non_block=True)
    for ask in (future.result, future.result, lambda: future.result(1)):
        with pytest.raises(TimeoutError, match=r"no answer within 0\.2 s from Worker_TP0"):
            ask()
    assert isinstance(future.exception(), TimeoutError)
    assert future.done()
    assert [needs.bytes_per_token for needs in executor.kv_cache_needs()] == [1000, 1001]


def test_an_error_of_one_rank_is_raised_at_once_and_shifts_no_later_reply(executor: MultiprocExecutor) -> None:
    slow = executor.collective_rpc("allocate_kv_cache", (SLEEP_ON_RANK_0_MS, 400), non_block=True)
    with pytest.raises(PlatformError, match="MemoryError: rank 1 is full"):
        executor.collective_rpc("allocate_kv_cache", (RAISE_ON_RANK, 1))
    assert [needs.bytes_per_token for needs in executor.kv_cache_needs()] == [1000, 1001]
    assert slow.result() == [None, None]


def test_an_error_has_type_message_rank_pid_method_and_traceback(make: MakeExecutor) -> None:
    executor = make()
    with pytest.raises(PlatformError, match="KeyError: 'string 7 tore'") as caught:
        executor.collective_rpc("allocate_kv_cache", (RAISE, 7))
    remote = caught.value.__cause__
    assert isinstance(remote, RemoteTraceback)
    failure = remote.failure
    assert (failure.rank, failure.pid, failure.activity) == (0, executor.worker_pids[0], "allocate_kv_cache")
    assert re.search(r"scripted_worker\.py.*line \d+, in allocate_kv_cache", str(remote))
    assert executor.collective_rpc("check_health") == [None]


def test_a_step_that_raises_ends_the_executor(make: MakeExecutor, tag: str) -> None:
    executor = make(2)
    failures: list[Exception] = []
    executor.on_failure(failures.append)
    with pytest.raises(WorkerError, match="execute_model of step 13: RuntimeError: unlucky"):
        executor.execute_model(SchedulerOutput(step=13)).result()
    with pytest.raises(WorkerError, match="unlucky"):
        executor.execute_model(SchedulerOutput(step=14))
    wait_until(lambda: failures and not tagged_processes(tag), 120, "the callback is called and the workers are gone")
    assert len(failures) == 1
    executor.on_failure(failures.append)  # registered after the end, called at once
    assert failures[0] is failures[1]


@pytest.mark.parametrize(
    ("code", "value", "how"),
    [(EXIT, 5, "exited with status 5"), (KILL, signal.SIGKILL, r"SIGKILL \(signal 9\).*out of memory")],
)
def test_a_worker_that_ends_in_a_call_is_named_with_what_it_did(
    make: MakeExecutor, code: int, value: int, how: str
) -> None:
    executor = make(2)
    pid = executor.worker_pids[1]
    start = time.monotonic()
    with pytest.raises(WorkerDiedError, match=rf"Worker_TP1 \(rank 1, pid {pid}\) .*{how}.*during allocate_kv_cache"):
        executor.collective_rpc("allocate_kv_cache", (code, int(value)), ranks=[1])
    assert time.monotonic() - start < SOON, "its death is noticed as an event"


def test_the_stack_of_a_crash_is_in_the_error(make: MakeExecutor) -> None:
    with pytest.raises(WorkerDiedError, match=r"SIGSEGV.*(?s:.*)in allocate_kv_cache"):
        make().collective_rpc("allocate_kv_cache", (KILL, int(signal.SIGSEGV)))


def test_all_workers_that_died_are_named(make: MakeExecutor) -> None:
    with pytest.raises(WorkerDiedError) as caught:
        make(2).collective_rpc("allocate_kv_cache", (EXIT, 5))
    assert "rank 0" in str(caught.value) and "rank 1" in str(caught.value)


def test_a_death_while_idle_is_noticed_without_a_call_and_ends_the_others(make: MakeExecutor, tag: str) -> None:
    executor = make(2)
    failures: list[Exception] = []
    executor.on_failure(failures.append)
    os.kill(executor.worker_pids[0], signal.SIGKILL)
    wait_until(lambda: failures, 120, "the callback is called")
    wait_until(lambda: not tagged_processes(tag), 120, "the other worker is ended")
    with pytest.raises(WorkerDiedError, match=r"Worker_TP0 .*SIGKILL.*while it was idle"):
        executor.collective_rpc("check_health")


def test_a_hung_step_fails_with_the_stack_of_the_rank_that_hangs(make: MakeExecutor, tag: str) -> None:
    executor = make(2, step_timeout=8.0)
    executor.execute_model(SchedulerOutput(step=99)).result()  # rank 0 answers, rank 1 hangs
    health = executor.collective_rpc("check_health", non_block=True)
    with pytest.raises(TimeoutError, match=r"Worker_TP1.*execute_model of step 99"):
        health.result(2.0)
    stop_process(executor.worker_pids[0])
    with pytest.raises(WorkerStuckError, match=r"Worker_TP1 \(rank 1, pid \d+\).*step 99(?s:.*)in execute_model"):
        executor.execute_model(SchedulerOutput(step=100)).result()
    wait_until(lambda: not tagged_processes(tag), 120, "even stopped workers are ended")


def test_a_request_that_cannot_be_read_ends_the_worker_with_the_reason(make: MakeExecutor) -> None:
    executor = make(2)
    executor._writer.enqueue({"no": "request"})
    with pytest.raises(WorkerDiedError) as caught:
        executor.collective_rpc("check_health", timeout=60)
    first, *rest = str(caught.value).splitlines()
    assert re.match(r"Worker_TP\d \(rank \d, pid \d+\) exited with status 1 during reading a request", first), first
    assert "ValidationError: Expected `array`, got `object`" in first
    assert any("in worker_busy_loop" in line for line in rest), rest


def test_corrupt_shared_memory_ends_the_worker_with_the_reason(make: MakeExecutor) -> None:
    executor = make()
    out = executor._writer._out
    out.wait_for_slot(None)
    with out._ring.payload(out.sequence, 64) as payload:
        payload[:] = b"\xff" * len(payload)
    out._ring.publish(out.sequence, 64, 0)
    out._next += 1
    out._items[0].notify()
    with pytest.raises(WorkerDiedError, match=r"Worker \(rank 0.*reading a request.*QueueCorruptError: .*claims"):
        executor.collective_rpc("check_health", timeout=60)


def test_a_result_of_the_wrong_type_fails_the_call_and_names_the_worker(
    make: MakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRIPTED_WORKER", "odd")
    executor = make(2)
    with pytest.raises(WorkerError, match=r"Worker_TP\d \(rank \d, pid \d+\) sent another type than available_kv_b"):
        executor.available_kv_bytes()
    assert executor.collective_rpc("check_health") == [None, None], "the workers stay usable"


def test_a_reply_in_another_ranks_name_ends_the_executor_and_names_the_sender(make: MakeExecutor) -> None:
    with pytest.raises(WorkerError, match=r"Worker_TP1 \(rank 1, pid \d+\) sent a reply as rank 7"):
        make(2).collective_rpc("allocate_kv_cache", (FORGE_ON_RANK_1, 7))


def test_a_step_that_does_not_end_is_reported_with_stacks_once_and_other_calls_without(
    make: MakeExecutor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mvllm.executor.rpc_executor._WARN_SECONDS", 0.3)
    caplog.set_level("INFO", logger="mvllm")
    executor = make(2)
    executor.collective_rpc("allocate_kv_cache", (SLEEP_ON_RANK_0_MS, 1000))
    assert "allocate_kv_cache has not ended after" in caplog.text and "The stack of" not in caplog.text
    caplog.clear()
    executor.execute_model(SchedulerOutput(step=99)).result()  # rank 1 hangs in it
    stop_process(executor.worker_pids[0])
    late = executor.execute_model(SchedulerOutput(step=100))
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(late.result)
        told = "execute_model of step 100 has not ended after"
        wait_until(lambda: caplog.text.count(told) >= 3, 120, lambda: caplog.text)
        executor.shutdown()
        with pytest.raises(EngineDeadError):
            waiter.result(120)
    [stack] = [record.getMessage() for record in caplog.records if "The stack of Worker_TP1" in record.getMessage()]
    assert "in execute_model" in stack and "scripted_worker.py" in stack


def test_a_death_after_a_reported_stack_does_not_repeat_it(make: MakeExecutor) -> None:
    executor = make(1)
    [worker] = executor.workers
    future = executor.collective_rpc("allocate_kv_cache", (SLEEP_MS, 60_000), non_block=True)
    wait_until(lambda: not worker.activity.is_idle, 120, "the worker is busy")
    assert "in allocate_kv_cache" in worker.dump_stack() and "in allocate_kv_cache" in worker.dump_stack()
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError) as caught:
        future.result()
    assert "Its stack" not in str(caught.value)


def test_a_rank_that_reads_no_messages_blocks_the_writer_until_the_timeout(make: MakeExecutor) -> None:
    executor = make(2, step_timeout=8.0)
    with pytest.raises(WorkerStuckError, match=r"Worker_TP1 \(rank 1.*took no request.*step 99(?s:.*)in execute_model"):
        for step in range(99, 120):
            executor.execute_model(SchedulerOutput(step=step)).result()


def test_a_worker_that_cannot_be_built_raises_its_own_error_and_leaves_nothing(
    make: MakeExecutor, monkeypatch: pytest.MonkeyPatch, tag: str
) -> None:
    monkeypatch.setenv("SCRIPTED_WORKER", "fail-1")
    with pytest.raises(PlatformError, match=r"Worker_TP1 \(rank 1, pid \d+\).*ValueError: no strings on rank 1"):
        make(2)
    assert not tagged_processes(tag)


def test_a_worker_that_does_not_start_in_time_is_named_with_its_stack(
    make: MakeExecutor, monkeypatch: pytest.MonkeyPatch, tag: str
) -> None:
    monkeypatch.setenv("SCRIPTED_WORKER", "hang-0")
    with pytest.raises(WorkerStuckError, match=r"Worker_TP0 (?s:.*)importing the worker(?s:.*)in __init__"):
        make(2, start_timeout=15.0)
    assert not tagged_processes(tag)


def test_shutdown_may_be_repeated_and_later_calls_say_so(make: MakeExecutor, tag: str) -> None:
    executor = make(2)
    pending = executor.execute_model(SchedulerOutput(step=0))
    start = time.monotonic()
    executor.shutdown()
    executor.shutdown()
    assert time.monotonic() - start < SOON
    assert not tagged_processes(tag)
    with pytest.raises(EngineDeadError, match="shut down"):
        pending.result()
    with pytest.raises(EngineDeadError, match="shut down"):
        executor.collective_rpc("check_health")


def test_every_thread_that_shuts_down_waits_for_the_end_and_pending_calls_raise(make: MakeExecutor, tag: str) -> None:
    executor = make(2)
    pending = executor.collective_rpc("allocate_kv_cache", (SLEEP_MS, 60_000), non_block=True)

    def shut_down() -> int:
        executor.shutdown()
        return len(tagged_processes(tag))

    with ThreadPoolExecutor() as pool:
        waiter = pool.submit(pending.result, 30)
        time.sleep(0.2)
        left = [pool.submit(shut_down) for _ in range(3)]
        assert [each.result(120) for each in left] == [0, 0, 0]
        with pytest.raises(EngineDeadError, match="have been shut down"):
            waiter.result(120)


def test_workers_that_ignore_the_stop_request_are_killed(make: MakeExecutor, tag: str) -> None:
    executor = make(2)
    executor.collective_rpc("allocate_kv_cache", (SLEEP_MS, 60_000), non_block=True)
    start = time.monotonic()
    executor.shutdown()
    assert time.monotonic() - start < SOON
    assert not tagged_processes(tag)


def test_a_garbage_collected_executor_ends_its_workers(make: MakeExecutor, tag: str) -> None:
    executor = make_executor(_config(1), choose_platform("scripted").platform)
    assert len(tagged_processes(tag)) == 1
    del executor
    gc.collect()
    wait_until(lambda: not tagged_processes(tag), 120, "the worker is gone")


def test_an_executor_that_is_collected_in_its_monitor_thread_ends_its_workers_gracefully(
    make: MakeExecutor, tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", problems.append)
    make(1).shutdown()  # opens descriptors that each process opens once
    num_open = len(os.listdir("/proc/self/fd"))
    before = set(threading.enumerate())
    executor = make_executor(_config(2), choose_platform("scripted").platform)
    victim = executor.worker_pids[0]
    is_collected = weakref.ref(executor)
    threads = {thread for thread in threading.enumerate() if thread.name == "worker-monitor"} - before
    assert len(threads) == 1
    take_deaths = ChildProcessGroup._reap_workers

    def collecting(group: ChildProcessGroup, running: Sequence[ChildProcessHandle]) -> None:
        gc.collect()
        take_deaths(group, running)

    monkeypatch.setattr(ChildProcessGroup, "_reap_workers", collecting)
    cycle: list[object] = [executor]
    cycle.append(cycle)
    gc.disable()  # only the monitor thread collects the executor
    try:
        del executor, cycle
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: not threads & set(threading.enumerate()), 120, "the monitor has ended")
    finally:
        gc.enable()
    assert is_collected() is None
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= num_open, 120, "all descriptors are closed")
    assert not problems, problems
    assert not tagged_processes(tag)


def test_a_worker_may_have_children_and_they_end_with_it(make: MakeExecutor, tag: str) -> None:
    executor = make()
    executor.collective_rpc("allocate_kv_cache", (SPAWN, 0))
    assert len(tagged_processes(tag)) == 2
    executor.shutdown()
    wait_until(lambda: not tagged_processes(tag), 120, "the worker's child is gone")


def test_a_fork_of_the_engines_process_does_not_end_its_workers(make: MakeExecutor) -> None:
    executor = make()
    child = os.fork()
    if child == 0:
        executor.shutdown()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert executor.collective_rpc("check_health") == [None]


def test_descriptors_are_closed(make: MakeExecutor) -> None:
    make(2).shutdown()  # opens descriptors that each process opens once
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        make(2).shutdown()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_executor_without_memory_for_its_queues_releases_everything(
    make: MakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(2).shutdown()  # opens descriptors that each process opens once
    before = len(os.listdir("/proc/self/fd"))

    def refused() -> None:
        with pytest.raises(SharedMemoryError):
            make(2)
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == before

    space = shared_memory_space()
    with monkeypatch.context() as patched:
        patched.setattr(rpc_queues, "shared_memory_space", lambda: replace(space, free_bytes=1000))
        refused()
    create, made = ShmRingBuffer.create, itertools.count()  # memory is short only when the last ring is created
    monkeypatch.setattr(ShmRingBuffer, "create", lambda *args: create(*args) if next(made) < 2 else _no_memory())
    refused()


def _no_memory() -> NoReturn:
    raise SharedMemoryError("none is left")


def test_output_of_workers_has_a_prefix_and_process_titles_name_them(
    make: MakeExecutor, capfd: pytest.CaptureFixture[str]
) -> None:
    executor = make(2)
    executor.collective_rpc("allocate_kv_cache", (PRINT, 0), ranks=[1])
    pid = executor.worker_pids[1]
    assert Path(f"/proc/{pid}/comm").read_text().strip() in ("Worker_TP1", "mvllm Worker_TP1")
    executor.shutdown()
    out = capfd.readouterr().out
    assert f"(Worker_TP1 pid={pid}) scripted_worker on device-1\n(Worker_TP1 pid={pid}) second line\n" in out


def test_an_idle_worker_uses_no_cpu(make: MakeExecutor) -> None:
    import psutil

    executor = make()
    executor.collective_rpc("check_health")
    worker = psutil.Process(executor.worker_pids[0])
    for _ in range(10):  # on a busy machine it may take a while until it waits
        before = sum(worker.cpu_times()[:2])
        for _ in range(2):
            time.sleep(1)
        used = sum(worker.cpu_times()[:2]) - before
        if used < 0.02:
            return
    pytest.fail(f"idle, it used {used} of 2 s")


def test_a_process_that_exits_without_shutdown_ends_its_workers(make: MakeExecutor, tag: str) -> None:
    code = """
import sys
from mvllm.config.engine_args import EngineArgs
from mvllm.executor.factory import make_executor
from mvllm.platform.choose import choose_platform
config = EngineArgs.from_kwargs(model="demo", tensor_parallel_size=2).create_engine_config()
executor = make_executor(config, choose_platform("scripted").platform)
print(*executor.worker_pids)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 2
    assert not tagged_processes(tag)


def test_a_step_with_copies_ends_when_every_rank_has_answered(executor: MultiprocExecutor) -> None:
    late = executor.collective_rpc("allocate_kv_cache", (SLEEP_MS, 1500), ranks=[1], non_block=True)
    assert executor.execute_model(SchedulerOutput(step=0)).result().step == 0
    assert not late.done(), "rank 0 answers a step alone, while rank 1 is late"
    output = executor.execute_model(SchedulerOutput(step=1, saved_blocks=[3], saved_host_blocks=[0])).result()
    assert late.done() and (output.step, output.sampled_token_ids) == (1, [0])
    assert executor.execute_model(SchedulerOutput(step=2, loaded_states=[3], loaded_host_states=[0])).result().step == 2

"""UniProcExecutor: one worker, errors raised with the results, methods called in the declared order."""

from __future__ import annotations

import pytest

from mvllm.errors import ConfigError
from mvllm.executor.uniproc import UniProcExecutor
from mvllm.messages.scheduler_output import ModelRunnerOutput, SchedulerOutput
from mvllm.platform.worker_protocol import KVCacheNeeds
from tests.unit.engine.builders import make_config
from tests.unit.worker.fake_platform import FakePlatform


@pytest.fixture
def started():
    platform = FakePlatform()
    executor = UniProcExecutor(make_config(seed=5), platform)
    [worker] = platform.built
    return executor, worker


def names(worker):
    return [name for name, _ in worker.calls]


def test_the_worker_is_rank_0_of_1_with_the_engines_seed(started):
    ctx = started[1].ctx
    assert (ctx.rank, ctx.world_size, ctx.seed, ctx.in_engine_process) == (0, 1, 5, True)


def test_the_methods_of_a_worker_are_called_in_order(started):
    executor, worker = started
    executor.start()
    assert executor.kv_cache_needs() == [KVCacheNeeds(8, (16,))]
    assert executor.available_kv_bytes() == [1000]
    executor.allocate_kv_cache(4, 16)
    assert executor.execute_model(SchedulerOutput(step=3)).result().step == 3
    executor.shutdown()
    executor.shutdown()
    assert names(worker) == [
        "__init__",
        "init_device",
        "load_model",
        "kv_cache_needs",
        "available_kv_bytes",
        ("allocate_kv_cache", 4, 16),
        "warm_up",
        "execute_model",
        "shutdown",
    ]


def test_results_are_a_list_in_rank_order(started):
    executor, _ = started
    assert executor.collective_rpc("available_kv_bytes") == [1000]
    assert executor.collective_rpc("available_kv_bytes", ranks=[0]) == [1000]
    assert executor.collective_rpc("available_kv_bytes", ranks=[]) == []
    assert executor.collective_rpc("available_kv_bytes", non_block=True).result() == [1000]


def test_an_error_is_raised_where_the_result_is_requested(started):
    executor, _ = started
    with pytest.raises(RuntimeError, match="does not answer"):
        executor.collective_rpc("check_health")
    future = executor.collective_rpc("check_health", non_block=True)
    with pytest.raises(RuntimeError, match="does not answer"):
        future.result()


def test_a_step_that_fails_does_not_raise_before_its_result(started, monkeypatch):
    executor, worker = started

    def fail(plan):
        raise MemoryError("out of memory")

    monkeypatch.setattr(worker, "execute_model", fail)
    future = executor.execute_model(SchedulerOutput(step=0))
    with pytest.raises(MemoryError):
        future.result()


def test_only_declared_methods_can_be_called(started):
    with pytest.raises(ConfigError, match="workers have no method"):
        started[0].collective_rpc("__class__")


def test_a_deferred_output_is_fetched_when_it_is_requested(started, monkeypatch):
    executor, worker = started
    collected = []

    def collect(step):
        collected.append(step)
        return ModelRunnerOutput(step=step)

    monkeypatch.setattr(worker, "execute_model", lambda plan: None)
    monkeypatch.setattr(worker, "collect_output", collect, raising=False)
    futures = [executor.execute_model(SchedulerOutput(step=step)) for step in range(2)]
    assert not collected
    assert [future.result().step for future in futures] == [future.result().step for future in futures] == [0, 1]
    assert collected == [0, 1]

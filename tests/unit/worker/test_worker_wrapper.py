"""The wrapper builds the platform's worker class and allows only declared methods."""

from __future__ import annotations

import dataclasses

import pytest

from mvllm.errors import ConfigError, PlatformError, UnsupportedMethodError
from mvllm.messages.scheduler_output import SchedulerOutput
from mvllm.platform.phases import Phase, current_phase
from mvllm.platform.topology import WorkerContext
from mvllm.platform.worker_protocol import KVCacheNeeds
from mvllm.worker.worker_wrapper import WorkerWrapper
from tests.unit.engine.builders import make_config
from tests.unit.worker.fake_platform import FakePlatform


@pytest.fixture
def wrapped():
    platform = FakePlatform()
    ctx = WorkerContext(rank=3, seed=7)
    wrapper = WorkerWrapper(make_config(), platform, ctx)
    [worker] = platform.built
    return wrapper, worker, ctx


def test_the_platforms_class_is_built_with_config_platform_and_context(wrapped):
    _, worker, ctx = wrapped
    assert worker.ctx is ctx
    assert worker.config.model.architecture == "FakeForCausalLM"


def test_declared_methods_are_called_with_their_arguments_and_results(wrapped):
    wrapper, worker, _ = wrapped
    assert wrapper.call("kv_cache_needs") == KVCacheNeeds(8, (16,))
    wrapper.call("allocate_kv_cache", 5, 16)
    assert worker.calls[-1][0] == ("allocate_kv_cache", 5, 16)
    assert wrapper.execute_model(SchedulerOutput(step=4)).step == 4


def test_the_worker_runs_in_the_worker_phase_and_the_caller_in_its_own(wrapped):
    wrapper, worker, _ = wrapped
    wrapper.call("init_device")
    wrapper.execute_model(SchedulerOutput(step=0))
    wrapper.shutdown()
    assert {phase for _, phase in worker.calls} == {Phase.WORKER}
    assert current_phase() is None


@pytest.mark.parametrize("method", ["__init__", "_note", "calls", "eval", "no_such_method", ""])
def test_undeclared_methods_are_refused(wrapped, method):
    with pytest.raises(ConfigError) as caught:
        wrapped[0].call(method)
    text = f"collective_rpc: workers have no method {method!r}. The setting worker_extension_cls adds methods."
    assert str(caught.value) == text


def test_errors_of_the_worker_are_raised(wrapped):
    with pytest.raises(RuntimeError, match="does not answer"):
        wrapped[0].call("check_health")
    assert current_phase() is None


def test_a_worker_without_a_model_of_core_may_decode_images_itself(wrapped):
    wrapper, worker, _ = wrapped
    with pytest.raises(UnsupportedMethodError, match="'decode_images'"):
        wrapper.call("call_model", "decode_images", [b"", 1, 1])
    worker.decode_images = lambda *args: args
    assert wrapper.call("call_model", "decode_images", [b"", 1, 1]) == (b"", 1, 1)


def test_other_methods_of_a_worker_are_not_those_of_its_model(wrapped):
    wrapper, worker, _ = wrapped
    with pytest.raises(UnsupportedMethodError, match="'call_model'"):
        wrapper.call("call_model", "warm_up", [])
    assert "warm_up" not in [name for name, _ in worker.calls]


def test_shutdown_happens_once(wrapped):
    wrapper, worker, _ = wrapped
    wrapper.shutdown()
    wrapper.shutdown()
    assert [name for name, _ in worker.calls].count("shutdown") == 1


def test_a_class_that_lacks_methods_is_refused_by_name():
    with pytest.raises(PlatformError, match=r"HalfAWorker.*'acme'.*lacks.*(load_model|warm_up)"):
        WorkerWrapper(make_config(), FakePlatform("HalfAWorker"), WorkerContext())


@pytest.mark.parametrize("path", ["x", "no_such_module:X", "json:nope", "os:system", "json:JSONDecoder"])
def test_a_class_that_cannot_be_built_is_refused_by_name(path):
    platform = FakePlatform()
    platform.worker_class = lambda: path
    with pytest.raises(PlatformError, match=f"{path}, the worker class of platform 'acme', cannot be loaded and built"):
        WorkerWrapper(make_config(), platform, WorkerContext())


def test_a_worker_class_is_not_built_if_another_library_is_privateuse1(monkeypatch):
    platform = FakePlatform()
    platform.spec = dataclasses.replace(platform.spec, torch_backend="acme")
    for owner in ("privateuseone", "acme"):
        monkeypatch.setattr("torch._C._get_privateuse1_backend_name", lambda owner=owner: owner)
        WorkerWrapper(make_config(), platform, WorkerContext())
    monkeypatch.setattr("torch._C._get_privateuse1_backend_name", lambda: "zeta")
    platform.built.clear()
    with pytest.raises(PlatformError, match=r"'acme' registers .*PrivateUse1\) is registered as 'zeta'"):
        WorkerWrapper(make_config(), platform, WorkerContext())
    assert not platform.built


def exits(*args):
    raise SystemExit(3)


def test_a_worker_that_ends_the_process_is_an_error_of_its_platform(wrapped):
    wrapper, worker, _ = wrapped
    worker.load_model = worker.execute_model = worker.shutdown = exits
    with pytest.raises(PlatformError, match=r"rank 3 on platform 'acme' failed in load_model: SystemExit: 3"):
        wrapper.call("load_model")
    with pytest.raises(PlatformError, match="tried to end the process"):
        wrapper.execute_model(SchedulerOutput(step=0))


def test_errors_in_shutdown_are_logged(wrapped, caplog):
    wrapper, worker, _ = wrapped
    worker.shutdown = exits
    with caplog.at_level("WARNING", logger="mvllm"):
        wrapper.shutdown()
    assert "failed in shutdown: SystemExit: 3" in caplog.text

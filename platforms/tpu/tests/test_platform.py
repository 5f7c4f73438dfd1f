"""The platform's answers without a device."""

from __future__ import annotations

import pytest

from mvllm.platform.phases import Phase, enter_phase
from mvllm.plugin_api import ConfigError, ParallelConfig, PlatformError
from mvllm_tpu import compile_cache, compile_mode, runtimes, xla_devices
from mvllm_tpu.platform import DEVICES_VARIABLE, make_platform
from mvllm_tpu.runtimes.torch_xla import TorchXla
from mvllm_tpu.step_compiler import LazyStepCompiler, NoStepCompiler


def test_every_worker_gets_pjrt_device(host, installed, monkeypatch):
    installed("torch_xla")
    monkeypatch.setenv(xla_devices.PJRT_VARIABLE, "CPU")
    topology = make_platform().topology(ParallelConfig(pipeline_parallel_size=2))
    assert [dict(each) for each in topology.env_per_worker] == [{"PJRT_DEVICE": "CPU"}] * 2


def test_a_worker_drives_all_tensor_parallel_devices(host, installed, monkeypatch):
    installed("torch_xla")
    monkeypatch.setenv(xla_devices.PJRT_VARIABLE, "CPU")
    parallel = ParallelConfig(tensor_parallel_size=4, pipeline_parallel_size=2)
    topology = make_platform().topology(parallel)
    assert (topology.num_workers, topology.devices_per_worker) == (2, 4)
    assert [dict(each) for each in topology.env_per_worker] == [{"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}] * 2
    monkeypatch.setenv(DEVICES_VARIABLE, "1")
    topology = make_platform().topology(parallel)
    assert (topology.num_workers, topology.devices_per_worker) == (8, 1)


def test_a_process_that_sees_another_number_of_devices_starts_a_worker(host, installed, monkeypatch):
    installed("torch_xla")
    monkeypatch.setattr(TorchXla, "_num_devices", 0)  # earlier tests may have bound devices
    monkeypatch.setenv(xla_devices.PJRT_VARIABLE, "CPU")
    two = ParallelConfig(tensor_parallel_size=2)
    assert "uni" not in make_platform().topology(two).executors
    monkeypatch.setenv(xla_devices.NUM_CPUS_VARIABLE, "2")
    assert make_platform().topology(two).executors[0] == "uni"


def test_a_process_that_has_bound_another_number_of_devices_starts_a_worker(host, installed, monkeypatch):
    installed("torch_xla")
    monkeypatch.setenv(xla_devices.PJRT_VARIABLE, "CPU")
    monkeypatch.setenv(xla_devices.NUM_CPUS_VARIABLE, "2")
    for bound in (1, 2):
        monkeypatch.setattr(TorchXla, "_num_devices", bound)
        for asked in (1, 2):
            executors = make_platform().topology(ParallelConfig(tensor_parallel_size=asked)).executors
            assert ("uni" in executors) == (asked == bound) and "mp" in executors


def test_the_error_of_a_worker_without_a_runtime_names_the_package(host, installed):
    installed()
    with pytest.raises(PlatformError, match="torch-xla"):
        make_platform().compiler()


def test_a_runtime_is_chosen_by_name(bare, installed, monkeypatch):
    installed("torch_xla")
    monkeypatch.setenv(runtimes.VARIABLE, "torch_xla")
    assert runtimes.choose().name == "torch_xla"
    monkeypatch.setenv(runtimes.VARIABLE, "jax")
    with pytest.raises(ConfigError, match=r"'jax'.*torch_xla"):
        runtimes.choose()


def test_how_steps_are_compiled_is_checked_in_plan(host, installed, monkeypatch):
    installed("torch_xla")
    monkeypatch.setenv(compile_mode.VARIABLE, "fast")
    with pytest.raises(ConfigError, match="MVLLM_TPU_COMPILE='fast' is not supported; set it to one of openxla, lazy"):
        make_platform().plan(None)
    monkeypatch.setenv(compile_mode.VARIABLE, "lazy")
    monkeypatch.setattr(TorchXla, "_num_devices", 1)
    assert isinstance(make_platform().compiler(), NoStepCompiler)
    monkeypatch.delenv(compile_mode.VARIABLE)
    assert isinstance(make_platform().compiler(), LazyStepCompiler)
    monkeypatch.setattr(TorchXla, "_num_devices", 2)
    assert isinstance(make_platform().compiler(), NoStepCompiler), "in SPMD mode"
    assert make_platform().capabilities.compile


def test_every_step_fits_into_a_bucket():
    with enter_phase(Phase.WORKER):
        shapes = make_platform().shapes()
    for buckets in (shapes.tokens, shapes.requests, shapes.pages):
        assert shapes.pad(1 << 20, buckets) >= 1 << 20


def test_the_compile_cache_has_a_folder_per_version(monkeypatch, tmp_path):
    monkeypatch.delenv(compile_cache.VARIABLE, raising=False)
    assert compile_cache.folder() is None
    monkeypatch.setenv(compile_cache.VARIABLE, str(tmp_path))
    monkeypatch.setattr(compile_cache, "version", lambda name: "1")
    one = compile_cache.folder()
    monkeypatch.setattr(compile_cache, "version", lambda name: "2")
    assert one is not None and one.parent == tmp_path and compile_cache.folder() != one


def test_the_doctor_checks_devices_and_runtime(host, installed):
    installed()
    found = {check.id: check for check in make_platform().doctor()}
    assert set(found) == {"platform.tpu.devices", "platform.tpu.runtime"}
    assert all(check.status.value == "broken" and check.remedy for check in found.values())

"""The ROCm platform through the contract, without a device: plans, topology, settings, doctor, worker errors."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from platforms.rocm.tests.machines import GIB, HALO, MI210, MI300A, MI300X, MI355X, RX6800, build, uuid_of

from mvllm.plugin_api import (
    CacheConfig,
    CheckStatus,
    ConfigError,
    ParallelConfig,
    Plan,
    PlatformError,
    SchedulerConfig,
    WorkerContext,
)
from mvllm_rocm import doctor, runtime
from mvllm_rocm.platform import make_platform
from mvllm_torch_gpu import torch_build
from mvllm_torch_gpu.torch_build import TorchBuild
from tests.helpers.plugins import ROOT, write_metadata

ROCM_6 = TorchBuild("2.13.0+rocm6.4", hip=(6, 4))


@pytest.fixture
def platform():
    return make_platform()


def engine_config(dtype="auto", kv_dtype="auto"):
    return SimpleNamespace(
        model=SimpleNamespace(dtype=dtype), cache=CacheConfig(dtype=kv_dtype), scheduler=SchedulerConfig()
    )


# --------------------------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("auto", "auto"), ("bfloat16", "float8_e4m3fn"), ("float32", "int8")])
def test_supported_dtypes_are_accepted(platform, dtype, kv_dtype):
    assert platform.plan(engine_config(dtype, kv_dtype)) == Plan()


@pytest.mark.parametrize("library", ["cudnn", "varlen_attn"])
def test_attention_of_cuda_devices_is_rejected_with_the_values_for_rocm(platform, library, monkeypatch):
    monkeypatch.setenv("MVLLM_ROCM_ATTENTION", library)
    with pytest.raises(ConfigError, match="set it to one of measured, triton, flash_attn, flashinfer, or unset it"):
        platform.plan(engine_config())


@pytest.mark.parametrize(
    ("variable", "known"), [("MVLLM_ROCM_COMPILE", "graphs, inductor, none"), ("MVLLM_ROCM_SUMS", "rccl, direct")]
)
def test_an_invalid_setting_raises_in_plan(platform, monkeypatch, variable, known):
    monkeypatch.setenv(variable, "fast")
    with pytest.raises(ConfigError, match=f"{variable}='fast' is not supported; set it to one of {known}"):
        platform.plan(engine_config())


def test_settings_of_the_cuda_platform_are_not_read(platform, monkeypatch):
    monkeypatch.setenv("MVLLM_CUDA_COMPILE", "fast")
    assert platform.plan(engine_config()) == Plan()


def test_topology_limits_workers_by_the_variable_that_hip_reads_first(platform):
    topology = platform.topology(ParallelConfig(tensor_parallel_size=2))
    assert (topology.num_workers, topology.devices_per_worker) == (2, 1)
    assert topology.device_variable == "HIP_VISIBLE_DEVICES"
    assert topology.env_per_worker == ({}, {})
    assert "uni" not in topology.executors and "uni" in platform.topology(ParallelConfig()).executors


@pytest.mark.parametrize(
    ("devices", "unified"),
    [((HALO,), True), ((MI300A,), True), ((MI300X,), False), ((HALO, MI300X), False), ((), False)],
)
def test_devices_without_memory_of_their_own_use_the_hosts(platform, machine, devices, unified):
    machine(*devices)
    assert platform.capabilities.unified_memory is unified
    assert platform.capabilities == platform.capabilities


@pytest.mark.parametrize(
    ("devices", "hip", "expected"),
    [
        ((MI300X, MI300X), None, ("float8_e4m3fnuz", True)),
        ((MI355X,), None, ("float8_e4m3fn", True)),
        ((MI355X, MI300X), None, ("float8_e4m3fnuz", False)),
        ((MI210, MI300X), None, ("float8_e4m3fnuz", False)),
        ((MI210, MI300X), "0", ("float8_e4m3fn", False)),
        ((), None, ("float8_e4m3fn", False)),
    ],
)
def test_float8_has_the_devices_format_and_is_multiplied_if_all_devices_do(
    platform, machine, monkeypatch, devices, hip, expected
):
    machine(*devices)
    if hip is not None:
        monkeypatch.setenv("HIP_VISIBLE_DEVICES", hip)
    assert (platform.float8, platform.multiplies_float8) == expected


# -------------------------------------------------------------------------------------------------------------- workers


@pytest.mark.skipif(torch.version.hip is not None, reason="torch is a build for ROCm")
def test_the_error_of_a_worker_with_a_cpu_build_of_torch_names_the_needed_build(platform):
    with pytest.raises(PlatformError, match=r"was built without ROCm\. Install torch's build for ROCm"):
        platform.init_device(WorkerContext())


def test_a_worker_finds_its_device_among_the_visible_ones(machine, monkeypatch):
    machine(MI300X, MI300X, MI210)
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "2,0")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1,0")
    assert [runtime.device_at(n).uuid for n in (0, 1)] == [uuid_of(0), uuid_of(2)]
    assert runtime.device_at(2) is None


def test_a_worker_without_the_drivers_files_has_no_driver_memory(machine, tmp_path, monkeypatch):
    monkeypatch.setattr("mvllm_rocm.topology.ROOT", tmp_path / "nothing")
    assert runtime.device_at(0) is None


@pytest.mark.parametrize(
    ("arch", "supported"), [("gfx942:sramecc+:xnack-", True), ("gfx1100", True), ("gfx1030", False)]
)
def test_a_worker_rejects_unsupported_targets(arch, supported):
    worker = object.__new__(runtime.RocmRuntime)
    found = worker.refusal(SimpleNamespace(gcnArchName=arch))
    if supported:
        assert found is None
    else:
        assert "is a gfx1030, needed is gfx90a" in found and "HIP_VISIBLE_DEVICES" in found


@pytest.mark.parametrize("module", [runtime.RocmRuntime.module, make_platform().module])
def test_devices_are_counted_by_hip_and_not_by_amd_smi(module, monkeypatch):
    """AMD SMI counts 0 where the package amdsmi and torch's wheel each bring a copy of its library."""
    started = []
    monkeypatch.setattr(torch.cuda, "init", lambda: started.append(True))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2 if started else 0)
    assert module.device_count() == 2


def test_hip_that_does_not_start_shows_no_device(monkeypatch, caplog):
    def fails():
        raise RuntimeError("No HIP GPUs are available\nand more")

    monkeypatch.setattr(torch.cuda, "init", fails)
    assert runtime.RocmRuntime.module.device_count() == 0
    assert "HIP does not start: No HIP GPUs are available." in caplog.text


# --------------------------------------------------------------------------------------------------------------- doctor


@pytest.fixture
def checks(machine, monkeypatch):
    """`checks(device, ...)`: the doctor's checks by their ids without the prefix."""

    def examined(*devices, build=ROCM_6):
        machine(*devices)
        monkeypatch.setattr(torch_build, "find", lambda: build)
        return {check.id.removeprefix("platform.rocm."): check for check in doctor.checks()}

    return examined


def test_all_checks_pass_on_a_working_machine(checks):
    found = checks(MI300X, MI300X)
    assert {check.status for name, check in found.items() if name != "kernels"} == {CheckStatus.OK}
    assert found["driver"].found == "Driver amdgpu, 6.12.12."
    assert found["devices"].found == "Visible devices: 0: AMD Instinct MI300X, 1: AMD Instinct MI300X."
    assert found["targets"].found == "Targets: gfx942."
    assert found["memory"].found == "192.0 GiB free of 192.0 GiB; 192.0 GiB free of 192.0 GiB."
    assert list(found) == ["driver", "devices", "targets", "torch", "kernels", "compiler", "memory"]


def test_memory_of_other_processes_is_reported(checks):
    check = checks(dataclasses.replace(MI300X, used=180 * GIB))["memory"]
    assert check.status is CheckStatus.WARNING and "12.0 GiB free of 192.0 GiB" in check.found
    assert "--memory-utilization" in check.remedy


def test_unknown_memory_is_reported_as_unknown(checks):
    found = checks(HALO, dataclasses.replace(MI300X, used=None))["memory"]
    assert found.status is CheckStatus.OK
    assert found.found == "Radeon 8060S uses the host's memory; 192.0 GiB, free ones unknown."


def test_unusable_devices_are_named(checks):
    found = checks(MI300X, RX6800, dataclasses.replace(MI300X, opens=False))
    assert found["targets"].status is CheckStatus.WARNING and "numbers [1]" in found["targets"].found
    assert found["driver"].status is CheckStatus.WARNING and "node 3: /dev/dri/renderD144" in found["driver"].found


def test_different_devices_are_a_warning(checks):
    check = checks(MI300X, MI210)["targets"]
    assert check.status is CheckStatus.WARNING and "gfx942, gfx90a" in check.found


def test_contradictory_device_lists_are_a_warning(checks, monkeypatch):
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    check = checks(MI300X, MI300X)["devices"]
    assert check.status is CheckStatus.WARNING and "HIP reads HIP_VISIBLE_DEVICES alone" in check.found
    assert "Unset CUDA_VISIBLE_DEVICES" in check.remedy


def test_a_torch_for_other_devices_fails_the_check(checks):
    check = checks(MI300X, build=TorchBuild("2.13.0+cu130", cuda=(13, 0)))["torch"]
    assert check.status is CheckStatus.BROKEN and "build for ROCm" in check.remedy


def test_without_a_driver_the_doctor_runs_only_the_drivers_check(tmp_path):
    [check] = doctor.checks(tmp_path)
    assert check.status is CheckStatus.BROKEN
    assert check.found == "There is no driver for ROCm devices: /sys/class/kfd is not there."
    assert "modprobe amdgpu" in check.remedy


# ---------------------------------------------------------------------------------------------------------- conformance

OTHER_MACHINE = """
import pathlib
import mvllm_rocm.topology as topology
import mvllm_torch_gpu.torch_build as build
build.find = lambda: build.TorchBuild("2.13.0+rocm6.4", hip=(6, 4))
topology.ROOT = pathlib.Path({root!r})
"""


def test_the_clauses_that_need_no_device_pass(tmp_path):
    """With the files of a machine, and with `torch_build.find` returning a ROCm build."""
    site = write_metadata(tmp_path / "site", "mvllm-rocm", "[mvllm.platforms]\nrocm = mvllm_rocm.plugin\n")
    root = build(tmp_path / "machine", MI300X, MI300X)
    (site / "sitecustomize.py").write_text(OTHER_MACHINE.format(root=str(root)))
    sources = [str(ROOT / "platforms" / name / "src") for name in ("rocm", "torch-gpu")]
    path = os.pathsep.join([str(site), *sources, *filter(None, sys.path)])
    foreign = ("CUDA_", "HIP_", "ROCR_", "MVLLM_", "PYTEST_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    main = "import sys; from mvllm.entrypoints.cli.main import main; sys.exit(main(sys.argv[1:]))"
    due = ["--only", "PLG,PRB,CFG", "--quick", "--", "-k", "not can_use_the_device", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-c", main, "conformance", "--platform", "rocm", *due],
        env={**kept, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "platform rocm: 13 passed" in done.stdout, done.stdout[-1000:]

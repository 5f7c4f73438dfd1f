"""The XPU platform through the contract, without a device: plans, topology, settings, doctor, worker errors."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from platforms.xpu.tests.machines import B60, B580, LUNAR_LAKE, MAX_1550, UHD_770, build

from mvllm.plugin_api import (
    CacheConfig,
    CheckStatus,
    ConfigError,
    GroupSpec,
    ParallelConfig,
    Plan,
    PlatformError,
    SchedulerConfig,
    WorkerContext,
)
from mvllm_torch_gpu import torch_build
from mvllm_torch_gpu.torch_build import TorchBuild
from mvllm_xpu import collective_backend, doctor, runtime
from mvllm_xpu import platform as platform_module
from mvllm_xpu.platform import make_platform
from tests.helpers.plugins import ROOT, write_metadata

XPU_BUILD = TorchBuild("2.13.0+xpu", other="XPU")


@pytest.fixture
def platform(monkeypatch):
    monkeypatch.delenv("MVLLM_XPU_COMPILE", raising=False)
    return make_platform()


def engine_config(dtype="auto", kv_dtype="auto"):
    return SimpleNamespace(
        model=SimpleNamespace(dtype=dtype), cache=CacheConfig(dtype=kv_dtype), scheduler=SchedulerConfig()
    )


# --------------------------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("auto", "auto"), ("bfloat16", "float8_e4m3fn"), ("float32", "int8")])
def test_supported_dtypes_are_accepted(platform, dtype, kv_dtype):
    assert platform.plan(engine_config(dtype, kv_dtype)) == Plan()


def test_an_invalid_setting_raises_in_plan(platform, monkeypatch):
    monkeypatch.setenv("MVLLM_XPU_COMPILE", "fast")
    assert platform.capabilities == platform.capabilities, "reading them must not fail"
    with pytest.raises(ConfigError, match="='fast' is not supported; set it to one of none, graphs, inductor"):
        platform.plan(engine_config())


@pytest.mark.parametrize(
    ("mode", "torch_has_graphs", "captures"),
    [(None, True, False), ("none", True, False), ("graphs", True, True), ("inductor", True, True)],
)
def test_steps_are_captured_on_request(platform, monkeypatch, mode, torch_has_graphs, captures):
    monkeypatch.setattr(platform_module, "torch_has_graphs", lambda: torch_has_graphs)
    if mode is not None:
        monkeypatch.setenv("MVLLM_XPU_COMPILE", mode)
    assert (platform.capabilities.graphs, platform.capabilities.compile) == (captures, captures)
    assert (platform.compiler() is not None) is captures
    assert platform.plan(engine_config()) == Plan()


def test_graphs_are_rejected_if_torch_lacks_them(platform, monkeypatch):
    monkeypatch.setattr(platform_module, "torch_has_graphs", lambda: False)
    assert platform.plan(engine_config()) == Plan()
    monkeypatch.setenv("MVLLM_XPU_COMPILE", "graphs")
    assert not platform.capabilities.compile
    with pytest.raises(ConfigError, match=r"MVLLM_XPU_COMPILE='graphs' captures.*the installed torch does not have"):
        platform.plan(engine_config())


def test_topology_limits_workers_by_the_affinity_mask(platform):
    topology = platform.topology(ParallelConfig(tensor_parallel_size=2))
    assert (topology.num_workers, topology.devices_per_worker) == (2, 1)
    assert topology.device_variable == "ZE_AFFINITY_MASK"
    assert "uni" not in topology.executors and "uni" in platform.topology(ParallelConfig()).executors


@pytest.mark.parametrize(
    ("devices", "unified"), [((LUNAR_LAKE,), True), ((B580,), False), ((LUNAR_LAKE, B580), False), ((), False)]
)
def test_devices_without_memory_of_their_own_use_the_hosts(platform, machine, devices, unified):
    machine(*devices)
    assert platform.capabilities.unified_memory is unified


# -------------------------------------------------------------------------------------------------------------- workers


@pytest.mark.skipif(getattr(torch.version, "xpu", None) is not None, reason="torch is a build for XPU")
def test_the_error_of_a_worker_with_a_cpu_build_of_torch_names_the_needed_build(platform):
    with pytest.raises(PlatformError, match=r"was built without XPU\. Install torch's build for XPU"):
        platform.init_device(WorkerContext())


def test_a_worker_finds_its_device_among_the_visible_ones(machine, monkeypatch):
    machine(LUNAR_LAKE, B60, B580)
    assert [runtime.device_at(n).name for n in (0, 1)] == ["Arc Pro B60", "Arc B580"]
    monkeypatch.setenv("ZE_AFFINITY_MASK", "1,2")
    monkeypatch.setenv("ONEAPI_DEVICE_SELECTOR", "level_zero:0")
    assert runtime.device_at(0).name == "Arc B580" and runtime.device_at(1) is None


def test_a_worker_without_the_kernels_files_has_no_driver_memory(monkeypatch, tmp_path):
    monkeypatch.setattr("mvllm_xpu.topology.ROOT", tmp_path / "nothing")
    assert runtime.device_at(0) is None


@pytest.mark.parametrize(
    ("properties", "supported"),
    [({"device_id": 0xE20B}, True), ({"device_id": 0xF123}, True), ({}, True), ({"device_id": 0x9A49}, False)],
)
def test_a_worker_rejects_chips_that_torch_does_not_support(properties, supported):
    worker = object.__new__(runtime.XpuRuntime)
    found = worker.refusal(SimpleNamespace(**properties))
    if supported:
        assert found is None
    else:
        assert "torch does not compute on it; needed is an Arc" in found and "ZE_AFFINITY_MASK" in found


@pytest.mark.parametrize(
    ("has_xccl", "older", "expected"), [(True, True, "xccl"), (True, False, "xccl"), (False, True, "ccl")]
)
def test_the_collective_backend_is_chosen_among_the_installed_ones(monkeypatch, tmp_path, has_xccl, older, expected):
    monkeypatch.setattr(torch.distributed.distributed_c10d, "is_xccl_available", lambda: has_xccl, raising=False)
    if older:
        (tmp_path / "oneccl_bindings_for_pytorch.py").write_text("")
        monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert collective_backend.backend() == expected
    finally:
        sys.modules.pop(collective_backend.OLDER, None)


def test_several_ranks_without_collectives_get_an_install_remedy(monkeypatch, platform):
    monkeypatch.setattr(torch.distributed.distributed_c10d, "is_xccl_available", lambda: False, raising=False)
    with pytest.raises(PlatformError, match=r"no collectives between XPU devices \(XCCL\).*torch 2.8 or newer"):
        platform.communicator(GroupSpec("tp", (0, 1), 0, init_method="tcp://127.0.0.1:1"), torch.device("cpu"))


# --------------------------------------------------------------------------------------------------------------- doctor


@pytest.fixture
def checks(machine, monkeypatch):
    """`checks(device, ...)`: the doctor's checks by their ids without the prefix."""

    def examined(*devices, build=XPU_BUILD, **options):
        machine(*devices, **options)
        monkeypatch.setattr(torch_build, "find", lambda: build)
        return {check.id.removeprefix("platform.xpu."): check for check in doctor.checks()}

    return examined


def test_all_checks_pass_on_a_working_machine(checks):
    found = checks(B60, B60)
    assert {check.status for name, check in found.items() if name != "kernels"} == {CheckStatus.OK}
    assert found["driver"].found == "Driver of the kernel: xe."
    assert found["devices"].found == "Visible devices: 0: Arc Pro B60, 1: Arc Pro B60."
    assert found["chips"].found == "Architectures: Xe2."
    assert (
        found["memory"].found == "Arc Pro B60: 24.0 GiB, free ones unknown; Arc Pro B60: 24.0 GiB, free ones unknown."
    )
    assert list(found) == ["driver", "devices", "chips", "runtime", "torch", "kernels", "compiler", "memory"]


def test_unknown_memory_is_reported_as_unknown(checks):
    assert checks(LUNAR_LAKE)["memory"].found == "Core Ultra graphics uses the host's memory."
    assert checks(B580)["memory"].found == "Arc B580: the kernel does not tell how much it has."


def test_an_integrated_gpu_is_reported_as_unused_if_there_is_a_card(checks):
    found = checks(UHD_770, B580)["devices"]
    assert found.status is CheckStatus.OK
    assert (
        found.found == "Visible devices: 0: Arc B580. Torch leaves out UHD or Iris Xe graphics, since there is a card."
    )


def test_unusable_devices_are_named(checks):
    found = checks(UHD_770, dataclasses.replace(B580, opens=False))
    assert found["chips"].status is CheckStatus.WARNING and "numbers [0] drive displays" in found["chips"].found
    assert found["driver"].status is CheckStatus.WARNING and "/dev/dri/renderD129" in found["driver"].found


def test_different_devices_are_a_warning(checks):
    check = checks(B580, MAX_1550)["chips"]
    assert check.status is CheckStatus.WARNING and "Xe2, Xe-HPC" in check.found


def test_contradictory_variables_are_a_warning(checks, monkeypatch):
    monkeypatch.setenv("ZE_AFFINITY_MASK", "1")
    monkeypatch.setenv("ONEAPI_DEVICE_SELECTOR", "level_zero:1")
    check = checks(B580, B580)["devices"]
    assert check.status is CheckStatus.WARNING and "of 1 that ZE_AFFINITY_MASK='1' leaves" in check.found


def test_a_missing_runtime_and_a_torch_for_other_devices_fail_their_checks(checks):
    found = checks(B580, build=TorchBuild("2.13.0+cu130", cuda=(13, 0)), libraries=())
    assert found["runtime"].status is CheckStatus.BROKEN and "libze1" in found["runtime"].remedy
    assert found["torch"].status is CheckStatus.BROKEN and "build for XPU" in found["torch"].remedy


def test_without_a_device_the_doctor_runs_only_the_drivers_check(tmp_path):
    [check] = doctor.checks(tmp_path)
    assert check.status is CheckStatus.BROKEN and check.found == "The PCI bus has no Intel GPU."


# ---------------------------------------------------------------------------------------------------------- conformance

OTHER_MACHINE = """
import pathlib
import mvllm_xpu.topology as topology
import mvllm_torch_gpu.torch_build as build
build.find = lambda: build.TorchBuild("2.13.0+xpu", other="XPU")
topology.ROOT = pathlib.Path({root!r})
"""


def test_the_clauses_that_need_no_device_pass(tmp_path):
    """With the files of a machine, and with `torch_build.find` returning an XPU build."""
    site = write_metadata(tmp_path / "site", "mvllm-xpu", "[mvllm.platforms]\nxpu = mvllm_xpu.plugin\n")
    root = build(tmp_path / "machine", B60, B60)
    (site / "sitecustomize.py").write_text(OTHER_MACHINE.format(root=str(root)))
    sources = [str(ROOT / "platforms" / name / "src") for name in ("xpu", "torch-gpu")]
    path = os.pathsep.join([str(site), *sources, *filter(None, sys.path)])
    foreign = ("ZE_", "ONEAPI_", "MVLLM_", "PYTEST_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    main = "import sys; from mvllm.entrypoints.cli.main import main; sys.exit(main(sys.argv[1:]))"
    due = ["--only", "PLG,PRB,CFG", "--quick", "--", "-k", "not can_use_the_device", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-c", main, "conformance", "--platform", "xpu", *due],
        env={**kept, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "platform xpu: 13 passed" in done.stdout, done.stdout[-1000:]

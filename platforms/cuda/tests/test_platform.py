"""The CUDA platform through the contract, without a device: plans, topology, settings, doctor, worker errors."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from platforms.cuda.tests import fake_nvml
from platforms.cuda.tests.fake_nvml import A100, L4, SPARK, T4

from mvllm.plugin_api import (
    CacheConfig,
    CheckStatus,
    ConfigError,
    ParallelConfig,
    Plan,
    PlatformError,
    ReferenceAttention,
    SchedulerConfig,
    WorkerContext,
)
from mvllm.testing.attention_cases import make_spec
from mvllm_cuda import doctor, runtime
from mvllm_cuda.nvml import NvmlError
from mvllm_cuda.platform import make_platform
from mvllm_torch_gpu import torch_build
from mvllm_torch_gpu.compiler import NoCompileBackend, make_compiler
from mvllm_torch_gpu.runtime import too_few_devices
from mvllm_torch_gpu.torch_build import TorchBuild
from tests.helpers.plugins import ROOT, write_metadata


@pytest.fixture
def platform():
    return make_platform()


def engine_config(dtype="auto", kv_dtype="auto", **scheduler):
    return SimpleNamespace(
        model=SimpleNamespace(dtype=dtype), cache=CacheConfig(dtype=kv_dtype), scheduler=SchedulerConfig(**scheduler)
    )


# --------------------------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("auto", "auto"), ("bfloat16", "float8_e4m3fn"), ("float32", "int8")])
def test_supported_dtypes_are_accepted(platform, dtype, kv_dtype):
    assert platform.plan(engine_config(dtype, kv_dtype)) == Plan()


@pytest.mark.parametrize(
    ("lines", "settings", "budget"),
    [
        ([A100], {"max_num_batched_tokens_is_default": True}, 8192),
        ([A100], {"max_num_batched_tokens": 2048}, None),
        ([A100], {"max_num_batched_tokens": 20_000, "max_num_batched_tokens_is_default": True}, None),
        ([A100, T4], {"max_num_batched_tokens_is_default": True}, None),
    ],
    ids=["default", "given", "more is needed", "a small device"],
)
def test_devices_of_data_centres_have_a_larger_token_budget_by_default(platform, machine, lines, settings, budget):
    machine(*(line.format(n=n) for n, line in enumerate(lines)))
    changes = platform.plan(engine_config(**settings)).changes
    found = [(change.field, change.value) for change in changes]
    assert found == ([] if budget is None else [("scheduler.max_num_batched_tokens", budget)])


def test_both_packages_of_flashinfer_have_the_same_exact_version():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    requirements = dict(text.split("==") for text in project["optional-dependencies"]["flashinfer"])
    assert set(requirements) == {"flashinfer-python", "flashinfer-cubin"}
    assert len(set(requirements.values())) == 1


@pytest.mark.parametrize("variable", ["MVLLM_CUDA_COMPILE", "MVLLM_CUDA_SUMS"])
def test_an_invalid_setting_raises_in_plan(platform, monkeypatch, variable):
    monkeypatch.setenv(variable, "fast")
    with pytest.raises(ConfigError, match=f"{variable}='fast' is not supported"):
        platform.plan(engine_config())


def test_small_sums_are_tried_without_nccl_unless_the_user_names_it(platform, monkeypatch):
    monkeypatch.delenv("MVLLM_CUDA_SUMS", raising=False)
    assert platform.settings.custom_all_reduce()
    monkeypatch.setenv("MVLLM_CUDA_SUMS", "nccl")
    assert not platform.settings.custom_all_reduce()


def test_devices_that_nvlink_does_not_connect_are_named(platform, machine):
    lines = [fake_nvml.A100.format(n=n) for n in range(3)]
    names = [fake_nvml.uuid_of(line) for line in lines]
    machine(*lines, f"nvlink|{names[0]}|{names[1]}", f"nvlink|{names[2]}|{names[1]}")
    assert platform.unlinked_devices(1, [0, 2]) is None
    assert platform.unlinked_devices(0, [1, 2]) == "NVLink does not connect the device 0 with [2]."
    machine("init|9")
    assert platform.unlinked_devices(0, [1]).startswith("NVML does not say what connects the devices: ")


def test_topology_limits_workers_by_the_variable_that_cuda_reads(platform, monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    topology = platform.topology(ParallelConfig(tensor_parallel_size=2))
    assert (topology.num_workers, topology.devices_per_worker) == (2, 1)
    assert topology.device_variable == "CUDA_VISIBLE_DEVICES"
    assert topology.env_per_worker == ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},) * 2
    assert "uni" not in topology.executors and "uni" in platform.topology(ParallelConfig()).executors


def test_the_users_order_of_devices_is_kept(platform, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert platform.topology(ParallelConfig()).env_per_worker == ({},)


@pytest.mark.parametrize(
    ("lines", "unified"), [((SPARK.format(n=0),), True), ((A100.format(n=0),), False), ((), False)]
)
def test_a_device_that_reports_no_memory_uses_the_hosts(platform, machine, lines, unified):
    machine(*lines)
    assert platform.capabilities.unified_memory is unified
    assert platform.capabilities == platform.capabilities


@pytest.mark.parametrize(
    ("lines", "multiplied"),
    [
        ((SPARK.format(n=0),), True),
        ((L4.format(n=0), SPARK.format(n=1)), True),
        ((A100.format(n=0),), False),
        ((L4.format(n=0), A100.format(n=1)), False),
        ((), False),
    ],
)
def test_8_bit_weights_are_widened_unless_every_device_multiplies_them(platform, machine, lines, multiplied):
    machine(*lines)
    assert platform.multiplies_float8 is multiplied
    assert platform.float8 == "float8_e4m3fn"


def test_without_kernels_attention_and_operations_run_in_plain_torch(platform, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name in ("mvllm_torch_gpu.attention", "mvllm_torch_gpu.ops"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert type(platform.attention_backend(make_spec())) is ReferenceAttention
    # Only those of sequence states, which need nothing but torch and read nothing on the host.
    assert {provider.op for provider in platform.ops()} == {"causal_conv1d", "ssd", "gated_delta_rule", "kda"}
    with pytest.raises(PlatformError, match="keys and values are stored as"):
        platform.attention_backend(make_spec(kv_dtype="float8_e5m2"))


def test_the_setting_selects_the_compiler():
    assert isinstance(make_compiler("none"), NoCompileBackend)
    function = print
    assert make_compiler("none").compile(function, dynamic=True) is function
    keys = {mode: make_compiler(mode).cache_key() for mode in ("none", "graphs", "inductor")}
    assert len(set(keys.values())) == 3 and torch.__version__ in keys["graphs"]


# -------------------------------------------------------------------------------------------------------------- workers


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is a build for CUDA")
def test_the_error_of_a_worker_with_a_cpu_build_of_torch_names_the_needed_build(platform):
    with pytest.raises(PlatformError, match=r"was built without CUDA\. Install torch's build for CUDA"):
        platform.init_device(WorkerContext())


def test_the_error_of_a_rank_without_a_device_names_the_visible_ones():
    text = too_few_devices(WorkerContext(rank=5, local_rank=1, world_size=8), 1, "CUDA", "CUDA_VISIBLE_DEVICES='3'")
    assert "Rank 5 is worker 1 of this machine" in text and "CUDA shows 1 (CUDA_VISIBLE_DEVICES='3')" in text
    assert "--tensor-parallel-size" in text
    assert "VISIBLE" not in too_few_devices(WorkerContext(), 0, "CUDA", "")


def test_a_worker_finds_its_device_among_the_visible_ones(machine, monkeypatch):
    machine(A100.format(n=0), A100.format(n=1), T4.format(n=2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    assert runtime.nvml_uuid(0) == fake_nvml.uuid_of(T4.format(n=2))
    assert runtime.nvml_uuid(1) == fake_nvml.uuid_of(A100.format(n=1))
    assert runtime.nvml_uuid(2) is None
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert runtime.nvml_uuid(0) is None, "CUDA may count another device as the first"


# --------------------------------------------------------------------------------------------------------------- doctor


@pytest.fixture
def checks(machine, monkeypatch):
    """`checks(*lines)`: the doctor's checks by their ids without the prefix."""

    def examined(*lines):
        machine(*lines)
        monkeypatch.setattr(torch_build, "find", lambda: TorchBuild("2.13.0+cu130", (13, 0)))
        return {check.id.removeprefix("platform.cuda."): check for check in doctor.checks()}

    return examined


def test_all_checks_pass_on_a_working_machine(checks):
    found = checks(A100.format(n=0), A100.format(n=1))
    assert [name for name, check in found.items() if check.status is CheckStatus.BROKEN] == []
    assert found["driver"].found == "Driver 580.65.06, for CUDA up to 13.0."
    assert found["devices"].found == "Visible devices: 0: NVIDIA A100-SXM4-80GB, 1: NVIDIA A100-SXM4-80GB."
    assert found["memory"].found.startswith("79.2 GiB free of 80.0 GiB; ")
    assert list(found) == ["driver", "devices", "order", "torch", "kernels", "compiler", "memory"]


def test_memory_of_other_processes_is_reported(checks):
    full = "device|NVIDIA A100|GPU-1|85899345920|1073741824|8.0"
    check = checks(full)["memory"]
    assert check.status is CheckStatus.WARNING and "1.0 GiB free of 80.0 GiB" in check.found
    assert "--memory-utilization" in check.remedy


def test_old_and_lost_devices_are_named(checks):
    found = checks(A100.format(n=0), T4.format(n=1), "lost")
    assert found["devices"].status is CheckStatus.WARNING and "numbers [1]" in found["devices"].found
    assert found["driver"].status is CheckStatus.WARNING and "device 2" in found["driver"].found


def test_an_uncertain_order_of_devices_is_a_warning(checks, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    check = checks(A100.format(n=0), T4.format(n=1))["order"]
    assert check.status is CheckStatus.WARNING and "PCI_BUS_ID" in check.remedy
    assert checks(A100.format(n=0), A100.format(n=1))["order"].status is CheckStatus.OK


def test_a_torch_that_is_too_new_for_the_driver_fails_the_check(checks):
    check = checks("driver|550.54|12040", A100.format(n=0))["torch"]
    assert check.status is CheckStatus.BROKEN and "Update the driver" in check.remedy


def test_without_a_driver_the_doctor_runs_only_the_drivers_check(monkeypatch):
    def absent():
        raise NvmlError("there is no driver", remedy="Install it.")

    monkeypatch.setattr(doctor, "read_inventory", absent)
    [check] = doctor.checks()
    assert (check.status, check.found, check.remedy) == (CheckStatus.BROKEN, "There is no driver.", "Install it.")


# ---------------------------------------------------------------------------------------------------------- conformance

OTHER_TORCH = """
import mvllm_torch_gpu.torch_build as build
build.find = lambda: build.TorchBuild("2.13.0+cu130", (13, 0))
"""


def test_the_clauses_that_need_no_device_pass(tmp_path):
    """With the replacement of NVML, and with `torch_build.find` returning a CUDA build."""
    site = write_metadata(tmp_path / "site", "mvllm-cuda", "[mvllm.platforms]\ncuda = mvllm_cuda.plugin\n")
    (site / "sitecustomize.py").write_text(OTHER_TORCH)
    sources = [str(ROOT / "platforms" / name / "src") for name in ("cuda", "torch-gpu")]
    path = os.pathsep.join([str(site), *sources, *filter(None, sys.path)])
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "MVLLM_", "PYTEST_"))}
    main = "import sys; from mvllm.entrypoints.cli.main import main; sys.exit(main(sys.argv[1:]))"
    due = ["--only", "PLG,PRB,CFG", "--quick", "--", "-k", "not can_use_the_device", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-c", main, "conformance", "--platform", "cuda", *due],
        env={**kept, **fake_nvml.environment(tmp_path, A100.format(n=0), A100.format(n=1)), "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "platform cuda: 13 passed" in done.stdout, done.stdout[-1000:]

"""The ROCm probe: availability with reasons, without loading torch or HIP."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from platforms.rocm.tests.machines import GIB, HALO, MI210, MI300X, RX6800, build

from mvllm_rocm import topology
from mvllm_rocm.probe import probe
from mvllm_torch_gpu import torch_build
from mvllm_torch_gpu.torch_build import TorchBuild
from tests.helpers.plugins import write_metadata

ROCM_6 = TorchBuild("2.13.0+rocm6.4", hip=(6, 4))
SOURCES = [str(Path(module.__file__).parents[1]) for module in (topology, torch_build)]


@pytest.fixture
def torch(monkeypatch):
    """`torch(build)`: sets the installed torch."""

    def installed(build):
        monkeypatch.setattr(torch_build, "find", lambda: build)

    installed(ROCM_6)
    return installed


def test_usable_devices(machine, torch):
    machine(MI300X, MI300X, MI210)
    found = probe()
    assert found.available and found.remedy is None
    assert found.reason == "2 × AMD Instinct MI300X (gfx942), 1 × AMD Instinct MI210 (gfx90a), driver 6.12.12"
    assert [(d.index, d.memory_bytes) for d in found.devices] == [(0, 192 * GIB), (1, 192 * GIB), (2, 64 * GIB)]


def test_devices_have_the_order_that_workers_see(machine, torch, monkeypatch):
    machine(MI300X, MI210)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1,0")
    assert [d.name for d in probe().devices] == ["AMD Instinct MI210 (gfx90a)", "AMD Instinct MI300X (gfx942)"]


def test_contradictory_device_lists_are_reported(machine, torch, monkeypatch):
    machine(MI300X, MI300X)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    found = probe()
    assert found.available and len(found.devices) == 1 and "HIP reads HIP_VISIBLE_DEVICES alone" in found.reason


def test_a_device_that_uses_the_hosts_memory_has_no_memory_size(machine, torch):
    machine(HALO)
    found = probe()
    assert found.available and found.devices[0].memory_bytes is None
    assert found.devices[0].name == "Radeon 8060S (gfx1151)"


def test_the_root_folder_selects_the_machine(tmp_path, torch):
    assert probe(build(tmp_path, MI300X)).available


@pytest.mark.parametrize(
    ("devices", "lists", "message", "remedy"),
    [
        ([], {}, "The driver finds no device", "rocminfo"),
        ([dataclasses.replace(MI300X, opens=False)], {}, "/dev/dri/renderD128 is not there", "--device=/dev/dri"),
        ([MI300X], {"ROCR_VISIBLE_DEVICES": ""}, "hides every device", "Unset ROCR_VISIBLE_DEVICES"),
        ([MI300X], {"HIP_VISIBLE_DEVICES": "4"}, "there is no device 4", "by number (0)"),
        ([MI300X], {"HIP_VISIBLE_DEVICES": "0,0"}, "torch then counts none", "Name each once"),
        ([RX6800], {}, "AMD gfx1030 is a gfx1030, needed is gfx90a", "Use a newer device"),
    ],
)
def test_unusable_devices(machine, torch, monkeypatch, devices, lists, message, remedy):
    machine(*devices)
    for name, text in lists.items():
        monkeypatch.setenv(name, text)
    found = probe()
    assert not found.available
    assert message in found.reason and remedy in found.remedy


@pytest.mark.parametrize(
    ("build", "message", "remedy"),
    [
        (None, "not installed", "Install its build for ROCm"),
        (TorchBuild("2.13.0+cpu"), "2.13.0+cpu was built for the host alone, not for ROCm", "build for ROCm"),
        (TorchBuild("2.13.0+cu130", cuda=(13, 0)), "was built for CUDA, not for ROCm", "reinstall mvllm-rocm"),
    ],
)
def test_a_torch_that_cannot_use_the_devices(machine, torch, build, message, remedy):
    machine(MI300X)
    torch(build)
    found = probe()
    assert not found.available and message in found.reason and remedy in found.remedy
    assert len(found.devices) == 1  # listed nevertheless


# ----------------------------------------------------------------------------------------------- in a fresh process

LOOK = """
import importlib, json, os, sys
sys.path[:0] = {sources!r}
modules = ["mvllm_rocm.plugin", "mvllm_rocm.probe", "mvllm_rocm.platform", "mvllm_rocm.doctor", "mvllm_rocm.settings"]
for name in modules:
    importlib.import_module(name)
from pathlib import Path
from mvllm.plugin_api import ParallelConfig
from mvllm_rocm import topology
from mvllm_rocm.platform import make_platform
topology.ROOT = Path({root!r})
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
found = importlib.import_module("mvllm_rocm.probe").probe()
platform = make_platform()
platform.capabilities, platform.topology(ParallelConfig()), platform.doctor()
loaded = sorted(name for name in ("torch", "triton", "mvllm_triton", "amdsmi") if name in sys.modules)
libraries = [lib for lib in ("libamdhip64", "libhsa-runtime64", "libamd_smi") if lib in open("/proc/self/maps").read()]
print(json.dumps([found.available, loaded, libraries, [name for name in opened if "/dev/" in name]]))
"""
NO_TORCH = "raise AssertionError('a probe has imported torch')\n"


def rocm_torch(folder: Path) -> str:
    """A folder with a torch whose files name ROCm and whose import fails."""
    package = folder / "torch"
    package.mkdir()
    (package / "__init__.py").write_text(NO_TORCH)
    (package / "version.py").write_text(
        "__version__ = '2.13.0+rocm6.4'\ncuda: Optional[str] = None\nhip = '6.4.43482'\n"
    )
    return str(folder)


def environment(path: list[str]) -> dict[str, str]:
    """Environment variables of a process that sees all devices."""
    kept = {name: value for name, value in os.environ.items() if "VISIBLE_DEVICES" not in name}
    return {**kept, "PYTHONPATH": os.pathsep.join([*path, *filter(None, sys.path)])}


def test_importing_probing_and_planning_load_neither_torch_nor_hip_and_open_no_device(tmp_path):
    root = build(tmp_path / "machine", MI300X)
    done = subprocess.run(
        [sys.executable, "-c", LOOK.format(sources=SOURCES, root=str(root))],
        env=environment([rocm_torch(tmp_path)]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True, [], [], []]


def mvllm(arguments: list[str], tmp_path: Path, root: Path) -> str:
    """Output of the command `mvllm` with mvllm-rocm installed, on a machine with these files."""
    site = write_metadata(tmp_path / "site", "mvllm-rocm", "[mvllm.platforms]\nrocm = mvllm_rocm.plugin\n")
    (site / "sitecustomize.py").write_text(
        f"import pathlib, mvllm_rocm.topology as t\nt.ROOT = pathlib.Path({str(root)!r})\n"
    )
    main = "import sys; from mvllm.entrypoints.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", main, *arguments],
        env=environment([str(site), *SOURCES]),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def test_without_a_driver_the_listing_names_reason_and_remedy(tmp_path):
    text = mvllm(["platforms"], tmp_path, tmp_path / "nothing")
    assert "rocm: not available" in text
    assert "There is no driver for ROCm devices: /sys/class/kfd is not there" in text
    assert "modprobe amdgpu" in text and "name another platform with --platform" in text


@pytest.mark.skipif(torch_build.find().hip is not None, reason="torch is a build for ROCm")
def test_with_a_torch_without_rocm_the_listing_names_the_needed_torch(tmp_path):
    text = mvllm(["platforms", "--platform", "rocm"], tmp_path, build(tmp_path / "machine", MI300X))
    assert "not for ROCm" in text and "Install torch's build for ROCm in its place" in text

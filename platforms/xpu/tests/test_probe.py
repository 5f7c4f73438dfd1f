"""The XPU probe: availability with reasons, without loading torch or Level Zero."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from platforms.xpu.tests.machines import B60, B580, GIB, LUNAR_LAKE, MAX_1550, UHD_770, build

from mvllm_torch_gpu import torch_build
from mvllm_torch_gpu.torch_build import TorchBuild
from mvllm_xpu import compute_runtime, topology
from mvllm_xpu.probe import probe, torch_has_graphs
from tests.helpers.plugins import write_metadata

XPU_BUILD = TorchBuild("2.13.0+xpu", other="XPU")
SOURCES = [str(Path(module.__file__).parents[1]) for module in (topology, torch_build)]


@pytest.fixture
def torch(monkeypatch):
    """`torch(build)`: sets the installed torch."""

    def installed(build):
        monkeypatch.setattr(torch_build, "find", lambda: build)

    installed(XPU_BUILD)
    return installed


def test_usable_devices(machine, torch):
    machine(B60, B60, B580)
    found = probe()
    assert found.available and found.remedy is None
    assert found.reason == "2 × Arc Pro B60, 1 × Arc B580, driver xe of the kernel"
    assert [(d.index, d.memory_bytes) for d in found.devices] == [(0, 24 * GIB), (1, 24 * GIB), (2, None)]


def test_devices_have_the_order_that_workers_see(machine, torch, monkeypatch):
    machine(B60, MAX_1550)
    monkeypatch.setenv("ZE_FLAT_DEVICE_HIERARCHY", "FLAT")
    monkeypatch.setenv("ZE_AFFINITY_MASK", "1,2")
    assert [d.name for d in probe().devices] == [
        "Data Center GPU Max 1550 (tile 0)",
        "Data Center GPU Max 1550 (tile 1)",
    ]


def test_problems_of_device_lists_are_reported(machine, torch, monkeypatch):
    machine(B580, B580)
    monkeypatch.setenv("ZE_AFFINITY_MASK", "1,5")
    found = probe()
    assert found.available and len(found.devices) == 1 and "there is no device 5, of 2" in found.reason


def test_an_integrated_gpu_is_usable_and_has_no_memory_size(machine, torch):
    machine(LUNAR_LAKE)
    found = probe()
    assert found.available and found.devices[0].memory_bytes is None
    assert found.devices[0].name == "Core Ultra graphics"


def test_the_root_folder_selects_the_machine(tmp_path, torch, monkeypatch):
    monkeypatch.delenv("ZE_AFFINITY_MASK", raising=False)
    assert probe(build(tmp_path, B580)).available


@pytest.mark.parametrize(
    ("devices", "variables", "message", "remedy"),
    [
        ([], {}, "The PCI bus has no Intel GPU", "--platform"),
        ([dataclasses.replace(B580, opens=False)], {}, "/dev/dri/renderD128 is not there", "--device=/dev/dri"),
        ([dataclasses.replace(UHD_770, renders=False)], {}, "shows pictures alone", "nomodeset"),
        ([UHD_770], {}, "drives displays, and torch does not compute on it", "Use a newer device"),
        ([B580], {"ZE_AFFINITY_MASK": "3"}, "hides every device", "by number (0)"),
        ([B580], {"ONEAPI_DEVICE_SELECTOR": "opencl:gpu"}, "leaves no device of Level Zero", "level_zero:0"),
        ([B580], {"ZE_AFFINITY_MASK": "0", "ONEAPI_DEVICE_SELECTOR": "level_zero:1"}, "'0' leaves", "level_zero:0"),
    ],
)
def test_unusable_devices(machine, torch, monkeypatch, devices, variables, message, remedy):
    machine(*devices)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    found = probe()
    assert not found.available
    assert message in found.reason and remedy in found.remedy


@pytest.mark.parametrize(
    ("build", "message", "remedy"),
    [
        (None, "not installed", "Install its build for XPU"),
        (TorchBuild("2.13.0+cpu"), "2.13.0+cpu was built for the host alone, not for XPU", "build for XPU"),
        (TorchBuild("2.13.0+cu130", cuda=(13, 0)), "was built for CUDA, not for XPU", "reinstall mvllm-xpu"),
    ],
)
def test_a_torch_that_cannot_use_the_devices(machine, torch, build, message, remedy):
    machine(B580)
    torch(build)
    found = probe()
    assert not found.available and message in found.reason and remedy in found.remedy
    assert len(found.devices) == 1  # listed nevertheless


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        (("libc.so.6",), "Level Zero's loader is not installed: libze_loader.so.1 is not found"),
        (("libze_loader.so.1",), "Level Zero's driver for GPUs is not installed: libze_intel_gpu.so.1 is not found"),
        (("libze_loader.so.10", "libze_intel_gpu.so.1"), "Level Zero's loader"),
    ],
)
def test_a_missing_compute_runtime_is_named_with_its_packages(machine, torch, installed, message):
    machine(B580, libraries=installed)
    found = probe()
    assert not found.available and message in found.reason
    assert "libze1 and libze-intel-gpu1" in found.remedy


def test_the_compute_runtime_may_be_outside_of_the_systems_folders(tmp_path):
    root = build(tmp_path / "machine", B580, libraries=())
    assert compute_runtime.missing(root, {}) is not None
    for name in (compute_runtime.LOADER, compute_runtime.DRIVER):
        (tmp_path / name).touch()
    assert compute_runtime.missing(root, {"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}"}) is None
    (root / "usr/lib64").mkdir(parents=True)
    for name in (compute_runtime.LOADER, compute_runtime.DRIVER):
        (root / "usr/lib64" / name).touch()
    assert compute_runtime.missing(root, {}) is None


def test_what_torch_was_built_for_is_read_from_its_file():
    text = "__version__ = '2.13.0+xpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\nxpu = '20260000'\n"
    assert torch_build.parse(text).kind == "XPU"


@pytest.mark.parametrize("file", [None, "xpu/graphs.py"])
def test_torchs_files_show_whether_it_has_graphs(monkeypatch, tmp_path, file):
    if file is not None:
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).touch()
    monkeypatch.setattr(torch_build, "folder", lambda: tmp_path)
    assert torch_has_graphs() is (file is not None)
    monkeypatch.setattr(torch_build, "folder", lambda: None)
    assert torch_has_graphs() is False


# ----------------------------------------------------------------------------------------------- in a fresh process

LOOK = """
import importlib, json, os, sys
sys.path[:0] = {sources!r}
modules = ["plugin", "probe", "platform", "doctor", "settings", "device_module", "driver_memory"]
for name in modules:
    importlib.import_module(f"mvllm_xpu.{{name}}")
from pathlib import Path
from mvllm.plugin_api import ParallelConfig
from mvllm_xpu import topology
from mvllm_xpu.platform import make_platform
topology.ROOT = Path({root!r})
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
found = importlib.import_module("mvllm_xpu.probe").probe()
platform = make_platform()
platform.capabilities, platform.topology(ParallelConfig()), platform.doctor()
loaded = sorted(name for name in ("torch", "triton", "mvllm_triton", "pyzes", "dpctl") if name in sys.modules)
maps = "".join(open("/proc/self/maps"))
libraries = [name for name in ("libze_loader", "libze_intel_gpu", "libsycl") if name in maps]
print(json.dumps([found.available, loaded, libraries, [name for name in opened if "/dev/dri" in name]]))
"""
NO_TORCH = "raise AssertionError('a probe has imported torch')\n"


def xpu_torch(folder: Path) -> str:
    """A folder with a torch whose files name XPU and whose import fails."""
    package = folder / "torch"
    package.mkdir()
    (package / "__init__.py").write_text(NO_TORCH)
    (package / "version.py").write_text("__version__ = '2.13.0+xpu'\ncuda = None\nhip = None\nxpu = '20260000'\n")
    return str(folder)


def environment(path: list[str]) -> dict[str, str]:
    """Environment variables of a process that sees all devices."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ZE_", "ONEAPI_", "MVLLM_"))}
    return {**kept, "PYTHONPATH": os.pathsep.join([*path, *filter(None, sys.path)])}


def test_importing_probing_and_planning_load_neither_torch_nor_level_zero_and_open_no_device(tmp_path):
    root = build(tmp_path / "machine", B580)
    done = subprocess.run(
        [sys.executable, "-c", LOOK.format(sources=SOURCES, root=str(root))],
        env=environment([xpu_torch(tmp_path)]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True, [], [], []]


def mvllm(arguments: list[str], tmp_path: Path, root: Path) -> str:
    """Output of the command `mvllm` with mvllm-xpu installed, on a machine with these files."""
    site = write_metadata(tmp_path / "site", "mvllm-xpu", "[mvllm.platforms]\nxpu = mvllm_xpu.plugin\n")
    (site / "sitecustomize.py").write_text(
        f"import pathlib, mvllm_xpu.topology as t\nt.ROOT = pathlib.Path({str(root)!r})\n"
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


def test_without_a_device_the_listing_names_reason_and_remedy(tmp_path):
    text = mvllm(["platforms"], tmp_path, tmp_path / "nothing")
    assert "xpu: not available" in text
    assert "The PCI bus has no Intel GPU" in text and "name another platform with --platform" in text


@pytest.mark.skipif(torch_build.find().kind == "XPU", reason="torch is a build for XPU")
def test_with_a_torch_without_xpu_the_listing_names_the_needed_torch(tmp_path):
    text = mvllm(["platforms", "--platform", "xpu"], tmp_path, build(tmp_path / "machine", B580))
    assert "not for XPU" in text and "Install torch's build for XPU in its place" in text

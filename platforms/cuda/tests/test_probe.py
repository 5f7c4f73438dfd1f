"""The CUDA probe: availability with reasons, without loading torch or CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from platforms.cuda.tests.fake_nvml import A100, GIB, SPARK, T4, environment

from mvllm_cuda import nvml
from mvllm_cuda.probe import probe
from mvllm_torch_gpu import torch_build
from mvllm_torch_gpu.torch_build import TorchBuild
from tests.helpers.plugins import write_metadata

CUDA_13 = TorchBuild("2.13.0+cu130", (13, 0))
SOURCE = Path(nvml.__file__).parents[1]


@pytest.fixture
def torch(monkeypatch):
    """`torch(build)`: sets the installed torch."""

    def installed(build):
        monkeypatch.setattr(torch_build, "find", lambda: build)

    installed(CUDA_13)
    return installed


def test_usable_devices(machine, torch):
    machine(A100.format(n=0), A100.format(n=1), T4.format(n=2))
    found = probe()
    assert found.available and found.remedy is None
    assert found.reason == "2 × NVIDIA A100-SXM4-80GB, 1 × Tesla T4, driver 580.65.06 (CUDA 13.0)"
    assert [(d.index, d.name, d.memory_bytes) for d in found.devices][:2] == [
        (0, "NVIDIA A100-SXM4-80GB", 80 * GIB),
        (1, "NVIDIA A100-SXM4-80GB", 80 * GIB),
    ]


def test_devices_have_the_order_that_workers_see(machine, torch, monkeypatch):
    machine(A100.format(n=0), T4.format(n=1))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert [(d.index, d.name) for d in probe().devices] == [(0, "Tesla T4"), (1, "NVIDIA A100-SXM4-80GB")]


def test_invalid_entries_of_a_device_list_are_reported(machine, torch, monkeypatch):
    machine(A100.format(n=0), A100.format(n=1))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,5")
    found = probe()
    assert found.available and len(found.devices) == 1 and "there is no device 5, of 2" in found.reason


def test_a_device_that_uses_the_hosts_memory_has_no_memory_size(machine, torch):
    machine(SPARK.format(n=0))
    found = probe()
    assert found.available and found.devices[0].memory_bytes is None


@pytest.mark.parametrize(
    ("lines", "variable", "message", "remedy"),
    [
        ([], None, "finds no device", "nvidia-smi"),
        (["lost"], None, "GPU is lost", "nvidia-smi"),
        ([A100.format(n=0)], "", "hides every device", "Unset CUDA_VISIBLE_DEVICES"),
        ([A100.format(n=0)], "4", "there is no device 4", "by number (0)"),
        ([T4.format(n=0)], None, "compute capability 7.5, needed is 8.0", "Ampere"),
        (["init|18"], None, "mismatch", "Restart the machine"),
    ],
)
def test_unusable_devices(machine, torch, monkeypatch, lines, variable, message, remedy):
    machine(*lines)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    found = probe()
    assert not found.available
    assert message in found.reason and remedy in found.remedy
    assert found.reason[0].isupper() or found.reason.startswith("NVIDIA")


@pytest.mark.parametrize(
    ("build", "driver", "message", "remedy"),
    [
        (None, 13000, "not installed", "'torch>=2.6'"),
        (TorchBuild("2.13.0+cpu"), 13000, "2.13.0+cpu was built for the host alone", "build for CUDA"),
        (TorchBuild("2.13.0+rocm7", hip=(7, 0)), 13000, "built for ROCm", "build for CUDA"),
        (CUDA_13, 12080, "CUDA 13.0, the driver supports 12.8 at most", "Update the driver"),
    ],
)
def test_a_torch_that_cannot_use_the_driver(machine, torch, build, driver, message, remedy):
    machine(f"driver|570.10|{driver}", A100.format(n=0))
    torch(build)
    found = probe()
    assert not found.available and message in found.reason and remedy in found.remedy
    assert len(found.devices) == 1  # listed nevertheless


def test_a_driver_supports_every_cuda_of_its_major_version(machine, torch):
    machine("driver|525.10|12000", A100.format(n=0))
    torch(TorchBuild("2.7.0+cu128", (12, 8)))
    assert probe().available


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n",
            TorchBuild("2.13.0+cpu"),
        ),
        ("__version__ = '2.13.0+cu130'\ndebug = False\ncuda: Optional[str] = '13.0'\nhip = None\n", CUDA_13),
        (
            "__version__ = '2.6.0+rocm6.2'\ncuda: Optional[str] = None\nhip: Optional[str] = '6.2.4'\n",
            TorchBuild("2.6.0+rocm6.2", hip=(6, 2)),
        ),
    ],
)
def test_what_torch_was_built_for_is_read_from_its_file(text, expected):
    assert torch_build.parse(text) == expected


def test_the_installed_torch_is_found_without_importing_it():
    import torch as imported

    found = torch_build.find()
    assert found.version == imported.__version__
    assert (found.cuda is None) == (imported.version.cuda is None)


# ----------------------------------------------------------------------------------------------- in a fresh process

LOOK = """
import importlib, json, sys
sys.path.insert(0, {source!r})
modules = ["mvllm_cuda.plugin", "mvllm_cuda.probe", "mvllm_cuda.platform", "mvllm_cuda.doctor", "mvllm_cuda.settings"]
for name in modules:
    importlib.import_module(name)
from mvllm.plugin_api import ParallelConfig
from mvllm_cuda.platform import make_platform
after_import = "".join(open("/proc/self/maps"))
spec = importlib.import_module("mvllm_cuda.plugin").mvllm_platform()
found = importlib.import_module("mvllm_cuda.probe").probe()
platform = make_platform()
platform.capabilities, platform.topology(ParallelConfig()), platform.doctor()
loaded = sorted(name for name in ("torch", "triton", "mvllm_triton", "pynvml") if name in sys.modules)
after_probe = "".join(open("/proc/self/maps"))
open_files = [__import__("os").readlink(f"/proc/self/fd/{{n}}") for n in range(3, 64)
              if __import__("os").path.islink(f"/proc/self/fd/{{n}}")]
print(json.dumps([found.available, loaded, [lib in after_import for lib in ("libnvidia-ml", "libcuda.so", "libcudart")],
                  [lib in after_probe for lib in ("libcuda.so", "libcudart")],
                  [name for name in open_files if "nvidia" in name]]))
"""
NO_TORCH = "raise AssertionError('a probe has imported torch')\n"


def cuda_torch(folder: Path) -> str:
    """A folder with a torch whose files name CUDA 13 and whose import fails."""
    package = folder / "torch"
    package.mkdir()
    (package / "__init__.py").write_text(NO_TORCH)
    (package / "version.py").write_text("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip = None\n")
    return str(folder)


def test_importing_probing_and_planning_load_neither_torch_nor_the_driver(tmp_path):
    path = os.pathsep.join([cuda_torch(tmp_path), *filter(None, sys.path)])
    machine = environment(tmp_path, A100.format(n=0))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    done = subprocess.run(
        [sys.executable, "-c", LOOK.format(source=str(SOURCE))],
        env={**kept, **machine, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    available, loaded, after_import, after_probe, devices = json.loads(done.stdout)
    assert available
    assert loaded == [] and devices == []
    assert after_import == [False, False, False], "importing has opened NVML or CUDA"
    assert after_probe == [False, False], "probing has opened CUDA"


def mvllm(arguments: list[str], tmp_path: Path, **variables: str) -> str:
    """Output of the command `mvllm` with mvllm-cuda installed."""
    metadata = write_metadata(tmp_path / "site", "mvllm-cuda", "[mvllm.platforms]\ncuda = mvllm_cuda.plugin\n")
    path = os.pathsep.join([str(metadata), str(SOURCE), *filter(None, sys.path)])
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "MVLLM_"))}
    main = "import sys; from mvllm.entrypoints.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", main, *arguments],
        env={**kept, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="there is a device here")
def test_without_a_driver_the_listing_names_reason_and_remedy(tmp_path):
    text = mvllm(["platforms"], tmp_path)
    assert "cuda: not available" in text
    assert "There is no NVIDIA driver: libnvidia-ml.so.1 cannot be loaded" in text
    assert "Install the NVIDIA driver" in text and "name another platform with --platform" in text


@pytest.mark.skipif(torch_build.find().cuda is not None, reason="torch is a build for CUDA")
def test_with_a_torch_without_cuda_the_listing_names_the_needed_torch(tmp_path):
    text = mvllm(["platforms", "--platform", "cuda"], tmp_path, **environment(tmp_path, A100.format(n=0)))
    assert "was built for the host alone, not for CUDA" in text
    assert "Install torch's build for CUDA in its place" in text


def test_hidden_devices_are_named_by_the_listing(tmp_path):
    hidden = {**environment(tmp_path, A100.format(n=0)), "CUDA_VISIBLE_DEVICES": ""}
    text = mvllm(["platforms"], tmp_path, **hidden)
    assert "CUDA_VISIBLE_DEVICES='' hides every device" in text and "Unset CUDA_VISIBLE_DEVICES" in text

"""mvllm-rocm and its shared code with mvllm-cuda are pure Python wheels that can be inspected without a device."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest
from packaging.requirements import Requirement

from tests.packaging.conftest import REPOSITORY

PACKAGES = {"rocm": "mvllm_rocm", "torch-gpu": "mvllm_torch_gpu"}
LOOK = """
import sys
import mvllm_rocm.plugin, mvllm_rocm.probe, mvllm_rocm.platform
found = mvllm_rocm.probe.probe()
print(mvllm_rocm.plugin.__file__)
print(mvllm_rocm.platform.TorchGpuPlatform.__module__, sys.modules["mvllm_torch_gpu.platform"].__file__)
print(found.available or bool(found.reason and found.remedy), "torch" in sys.modules)
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Built wheels, by the name of the folder."""
    found = {}
    for name in PACKAGES:
        folder = tmp_path_factory.mktemp(name)
        left_out = shutil.ignore_patterns("build", "*.egg-info", "tests")
        copy = shutil.copytree(REPOSITORY / "platforms" / name, folder / name, ignore=left_out)
        command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, copy]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        [found[name]] = folder.glob("*.whl")
    return found


@pytest.mark.parametrize(("name", "package"), PACKAGES.items())
def test_a_wheel_is_for_any_machine_and_holds_the_package_alone(wheels, name, package):
    assert wheels[name].name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheels[name]).namelist()
    modules = {f"{package}/{path.name}" for path in (REPOSITORY / "platforms" / name / "src" / package).glob("*.py")}
    assert {file for file in names if not file.startswith(f"{package}-")} == {*modules, f"{package}/py.typed"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "rocm",
            {
                "mvllm",
                "mvllm-gguf",
                "mvllm-parsers",
                "mvllm-tools",
                "mvllm-torch-gpu",
                "mvllm-transformers-backend",
                "torch",
            },
        ),
        ("torch-gpu", {"mvllm", "mvllm-triton-kernels", "torch"}),
    ],
)
def test_they_require_minimum_versions_and_no_exact_versions(name, expected):
    project = tomllib.loads((REPOSITORY / "platforms" / name / "pyproject.toml").read_text())["project"]
    requirements = {Requirement(text).name: Requirement(text) for text in project["dependencies"]}
    assert set(requirements) == expected
    assert str(requirements["torch"].specifier).startswith(">=")
    assert ("entry-points" in project) == (name == "rocm"), "what is shared is no platform"


def test_the_installed_wheels_report_whether_they_can_be_used(wheels, tmp_path):
    for wheel in wheels.values():
        zipfile.ZipFile(wheel).extractall(tmp_path)
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY / "core"), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", LOOK], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    where, shared, found = done.stdout.splitlines()
    assert (
        where.startswith(str(tmp_path)) and shared == f"mvllm_torch_gpu.platform {tmp_path}/mvllm_torch_gpu/platform.py"
    )
    assert found == "True False"

"""mvllm-xpu is a pure Python wheel that can be inspected without a device."""

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

SOURCE = REPOSITORY / "platforms" / "xpu"
LOOK = """
import sys
import mvllm_xpu.plugin, mvllm_xpu.probe, mvllm_xpu.platform
found = mvllm_xpu.probe.probe()
print(mvllm_xpu.plugin.__file__)
print(found.available or bool(found.reason and found.remedy), "torch" in sys.modules)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("xpu")
    left_out = shutil.ignore_patterns("build", "*.egg-info", "tests")
    copy = shutil.copytree(SOURCE, folder / "xpu", ignore=left_out)
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, copy]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [found] = folder.glob("*.whl")
    return found


def test_a_wheel_is_for_any_machine_and_holds_the_package_alone(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    modules = {f"mvllm_xpu/{path.name}" for path in (SOURCE / "src" / "mvllm_xpu").glob("*.py")}
    assert {file for file in names if not file.startswith("mvllm_xpu-")} == {*modules, "mvllm_xpu/py.typed"}


def test_it_requires_minimum_versions_and_no_exact_versions():
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
    requirements = {Requirement(text).name: Requirement(text) for text in project["dependencies"]}
    assert set(requirements) == {
        "mvllm",
        "mvllm-gguf",
        "mvllm-parsers",
        "mvllm-tools",
        "mvllm-torch-gpu",
        "mvllm-transformers-backend",
        "torch",
    }
    assert str(requirements["torch"].specifier) == ">=2.7"
    assert project["entry-points"] == {"mvllm.platforms": {"xpu": "mvllm_xpu.plugin"}}


def test_the_installed_wheel_reports_whether_it_can_be_used(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    shared = REPOSITORY / "platforms" / "torch-gpu" / "src"
    path = os.pathsep.join([str(tmp_path), str(shared), str(REPOSITORY / "core"), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", LOOK], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    where, found = done.stdout.splitlines()
    assert where.startswith(str(tmp_path)) and found == "True False"

"""mvllm-cuda is a pure Python wheel that requires no exact torch version, and can be inspected without a device."""

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

PROJECT = REPOSITORY / "platforms" / "cuda"
LOOK = """
import sys
import mvllm_cuda.plugin, mvllm_cuda.probe, mvllm_cuda.platform
found = mvllm_cuda.probe.probe()
print(mvllm_cuda.plugin.__file__)
print(found.available or bool(found.reason and found.remedy), "torch" in sys.modules)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    copy = shutil.copytree(PROJECT, folder / "cuda", ignore=shutil.ignore_patterns("build", "*.egg-info", "tests"))
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, copy]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [built] = folder.glob("*.whl")
    return built


def test_the_wheel_is_for_any_machine_and_holds_the_package_alone(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    modules = {f"mvllm_cuda/{path.name}" for path in (PROJECT / "src" / "mvllm_cuda").glob("*.py")}
    assert {name for name in names if not name.startswith("mvllm_cuda-")} == {*modules, "mvllm_cuda/py.typed"}


def test_it_requires_minimum_versions_and_no_exact_versions():
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
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
    assert str(requirements["torch"].specifier).startswith(">=")


def test_the_installed_wheel_reports_whether_it_can_be_used(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY / "core"), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", LOOK], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    where, found = done.stdout.splitlines()
    assert where.startswith(str(tmp_path)) and found == "True False"

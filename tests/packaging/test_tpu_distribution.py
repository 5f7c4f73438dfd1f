"""mvllm-tpu is a pure Python wheel that requires no TPU runtime, and can be inspected without one."""

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

PROJECT = REPOSITORY / "platforms" / "tpu"
LOOK = """
import sys
import mvllm_tpu.plugin, mvllm_tpu.probe, mvllm_tpu.platform
found = mvllm_tpu.probe.probe()
print(mvllm_tpu.plugin.__file__)
print(found.available or bool(found.reason and found.remedy), {"torch", "torch_xla"} & set(sys.modules))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    copy = shutil.copytree(PROJECT, folder / "tpu", ignore=shutil.ignore_patterns("build", "*.egg-info", "tests"))
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, copy]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [found] = folder.glob("*.whl")
    return found


def test_the_wheel_is_for_any_machine_and_holds_the_package_alone(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    source = PROJECT / "src"
    modules = {str(path.relative_to(source)) for path in (source / "mvllm_tpu").rglob("*.py")}
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.startswith("mvllm_tpu-")}
    assert names == {*modules, "mvllm_tpu/py.typed"}


def test_runtimes_are_extras_because_each_requires_its_own_torch():
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    required = {Requirement(text).name for text in project["dependencies"]}
    assert required == {"mvllm", "mvllm-gguf", "mvllm-parsers", "mvllm-tools", "mvllm-transformers-backend", "torch"}
    assert "torch-xla" in project["optional-dependencies"]


def test_the_installed_wheel_reports_whether_it_can_be_used(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY / "core"), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", LOOK], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    where, found = done.stdout.splitlines()
    assert where.startswith(str(tmp_path)) and found == "True set()"

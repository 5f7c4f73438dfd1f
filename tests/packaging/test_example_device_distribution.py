"""mvllm-example-device needs its compiled device: without a compiler the build fails with a clear error."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

from tests.packaging.conftest import REPOSITORY

PROJECT = REPOSITORY / "plugins" / "example-device"


@pytest.fixture
def project(tmp_path):
    """A minimal copy of the distribution: a small source file, and a library that an earlier build left behind."""
    folder = tmp_path / "example-device"
    shutil.copytree(PROJECT, folder, ignore=shutil.ignore_patterns("build", "*.egg-info", "*.so", "__pycache__"))
    (folder / "csrc" / "device.cpp").write_text('extern "C" int answer() { return 42; }\n')
    (folder / "src" / "mvllm_example_device" / "_device.so").write_bytes(b"left behind")
    return folder


def build(project, kind, **variables):
    command = [sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", project / "dist", project]
    return subprocess.run(
        [str(part) for part in command], env={**os.environ, **variables}, capture_output=True, text=True, timeout=300
    )


@pytest.mark.exhaustive
def test_without_a_compiler_nothing_is_built_and_the_remedy_is_named(project):
    done = build(project, "wheel", CC="/nonexistent/cc", CXX="/nonexistent/c++")
    assert done.returncode != 0 and not list((project / "dist").glob("*.whl"))
    said = done.stdout + done.stderr
    assert "error: mvllm-example-device needs a C++ compiler" in said and "remedy: install one" in said


@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_with_one_the_wheel_holds_the_library_that_was_just_built(project):
    done = build(project, "wheel")
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = (project / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert "mvllm_example_device/py.typed" in archive.namelist()
        assert archive.read("mvllm_example_device/_device.so")[:4] == b"\x7fELF"


@pytest.mark.exhaustive
def test_the_source_archive_holds_the_device_and_nothing_built(project):
    done = build(project, "sdist")
    assert done.returncode == 0, done.stdout + done.stderr
    [archive] = (project / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = opened.getnames()
    assert any(name.endswith("csrc/device.cpp") for name in names) and not any(name.endswith(".so") for name in names)

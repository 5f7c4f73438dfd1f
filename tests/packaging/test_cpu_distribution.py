"""mvllm-cpu builds with and without a compiler, without torch as a build requirement, and without files of earlier
builds."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest
from packaging.requirements import Requirement

from tests.packaging.conftest import REPOSITORY, load_script

PROJECT = REPOSITORY / "platforms" / "cpu"
ANSWER = """
#include "answer.h"
#include <thread>
extern "C" int mvllm_answer() {
    int sum = 0;
    std::thread([&] { sum = ANSWER; }).join();
    return sum;
}
"""


@pytest.fixture
def project(tmp_path):
    """A minimal copy of the distribution: one small source file, and a library that an earlier build left behind."""
    folder = tmp_path / "cpu"
    package = folder / "src" / "mvllm_cpu"
    package.mkdir(parents=True)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE"):
        shutil.copy(PROJECT / name, folder / name)
    (package / "__init__.py").touch()
    (package / "py.typed").touch()
    (package / "_kernels.so").write_bytes(b"left behind")
    (folder / "csrc").mkdir()
    (folder / "csrc" / "answer.cpp").write_text(ANSWER)
    (folder / "csrc" / "answer.h").write_text("#define ANSWER 42\n")
    return folder


def build(project, kind, **variables):
    """Builds a `wheel` or `sdist` and returns its path; CC and CXX choose the compiler."""
    command = [sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", project / "dist", project]
    done = subprocess.run(
        [str(part) for part in command], env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [built] = (project / "dist").glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_a_compiler_gives_a_library_that_any_python_loads(project, tmp_path):
    wheel = build(project, "wheel")
    assert "-py3-none-" in wheel.name and not wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract("mvllm_cpu/_kernels.so", tmp_path)
    assert ctypes.CDLL(str(tmp_path / "mvllm_cpu" / "_kernels.so")).mvllm_answer() == 42


@pytest.mark.parametrize("compiler", ["/nonexistent/c++", "false"])
def test_without_a_working_compiler_it_installs_and_the_library_is_absent(project, compiler):
    wheel = build(project, "wheel", CC=compiler, CXX=compiler)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "mvllm_cpu/py.typed" in names
    assert not [name for name in names if name.endswith(".so")], "an older library must not be shipped as a new one"


def test_the_source_archive_holds_the_sources_and_nothing_built(project):
    with tarfile.open(build(project, "sdist")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"csrc/answer.cpp", "csrc/answer.h", "setup.py", "LICENSE"} <= names
    assert not [name for name in names if name.endswith((".so", ".o"))]


def test_torch_is_a_floor_and_no_part_of_the_build():
    declared = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    required = {Requirement(text).name: Requirement(text) for text in declared["project"]["dependencies"]}
    assert {specifier.operator for specifier in required["torch"].specifier} == {">="}
    assert required["mvllm"].specifier.contains("0.9.0")
    assert [Requirement(text).name for text in declared["build-system"]["requires"]] == ["setuptools"]
    assert declared["project"]["entry-points"]["mvllm.platforms"] == {"cpu": "mvllm_cpu.plugin"}


OLD_GLIBC = """
#include <cmath>
#include <stdexcept>
#include <thread>
extern "C" double logarithm(double x) {
    double result = 0;
    std::thread([&] {
        try {
            throw std::runtime_error("caught");
        } catch (const std::exception&) {
            result = std::log(x);
        }
    }).join();
    return result;
}
"""


@pytest.mark.skipif(not shutil.which("c++") or not shutil.which("objdump"), reason="needs a C++ compiler and binutils")
def test_wheels_of_the_kernels_need_no_newer_glibc_and_no_libstdcxx(tmp_path, monkeypatch):
    kernel_wheels = load_script(REPOSITORY / "ci" / "kernel_wheels.py", monkeypatch)
    [machine] = [each for each in kernel_wheels.MACHINES if each.name == platform.machine()]
    (tmp_path / "stubs.s").write_text(kernel_wheels.stubs(machine))
    (tmp_path / "logarithm.cpp").write_text(OLD_GLIBC)
    library = tmp_path / "logarithm.so"
    threads = subprocess.run(["c++", "-print-file-name=libpthread.so.0"], capture_output=True, text=True).stdout.strip()
    sources = [tmp_path / "stubs.s", tmp_path / "logarithm.cpp"]
    command = ["c++", "-shared", "-fPIC", "-pthread", *kernel_wheels.LINK, *sources, threads, "-o", library]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    function = ctypes.CDLL(str(library)).logarithm
    function.restype, function.argtypes = ctypes.c_double, [ctypes.c_double]
    assert function(math.e) == 1.0
    symbols = subprocess.run(["objdump", "-p", "-T", library], capture_output=True, text=True, check=True).stdout
    assert max((2, int(minor)) for minor in re.findall(r"GLIBC_2\.(\d+)", symbols)) <= (2, 28)
    assert "GLIBCXX" not in symbols and "libstdc++" not in symbols


def test_the_kernels_link_no_openmp_runtime():
    library = PROJECT / "src" / "mvllm_cpu" / "_kernels.so"
    if not shutil.which("c++"):
        pytest.skip("no compiler")
    assert library.exists(), "the set-up compiles the kernels where there is a compiler"
    content = library.read_bytes()
    assert b"omp_get_max_threads" in content, "torch's runtime says how many threads there are"
    assert not re.search(rb"lib(gomp|omp|iomp5)[.-]", content)

"""The doctor finds out whether Triton can compile, before the first kernel fails."""

from __future__ import annotations

import os
import sysconfig

import pytest

from mvllm.plugin_api import CheckStatus
from mvllm_torch_gpu import doctor_checks


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """`programs(*names)`: only these programs exist; Python's headers do."""
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path / "include")})
    monkeypatch.delenv("CC", raising=False)

    def exist(*names):
        (tmp_path / "bin").mkdir(exist_ok=True)
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        for name in names:
            (tmp_path / "bin" / name).touch(mode=0o755)
            os.chmod(tmp_path / "bin" / name, 0o755)
        return tmp_path

    return exist


def test_a_compiler_and_pythons_headers_are_enough(programs):
    folder = programs("clang")
    check = doctor_checks.compiler_check("cuda")
    assert (check.id, check.status) == ("platform.cuda.compiler", CheckStatus.OK)
    assert str(folder / "bin" / "clang") in check.found
    programs("gcc")
    assert doctor_checks.c_compiler() == str(folder / "bin" / "gcc"), "as in Triton"


def test_the_compiler_that_a_variable_names_has_precedence(programs, monkeypatch):
    folder = programs("gcc", "mine")
    for value, found in (("mine -m64", str(folder / "bin" / "mine")), ("absent", None), ("", None), ("'", None)):
        monkeypatch.setenv("CC", value)
        assert doctor_checks.c_compiler() == found


def test_what_is_missing_is_named_with_the_packages_that_have_it(programs):
    folder = programs()
    (folder / "include" / "Python.h").unlink()
    check = doctor_checks.compiler_check("rocm")
    assert check.status is CheckStatus.BROKEN and "a C compiler" in check.found and "Python.h" in check.found
    assert "python3-dev" in check.remedy
    programs("gcc")
    check = doctor_checks.compiler_check("rocm")
    assert check.status is CheckStatus.BROKEN and "compiler (" not in check.found


def test_the_header_is_where_the_interpreter_has_it(monkeypatch):
    monkeypatch.setattr(sysconfig, "get_default_scheme", lambda: "posix_local")
    asked = []
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: asked.append(scheme) or {"include": "/usr/include"})
    assert str(doctor_checks.python_header()) == "/usr/include/Python.h" and asked == ["posix_prefix"]

"""ci/stub_libraries.py: stub libraries let a library be loaded whose dependencies are missing."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from tests.packaging.conftest import REPOSITORY, load_script

VENDOR = """
int acmeMultiply(void) { return 1; }
int acmeVersioned(void) { return 2; }
const char* acmeGetErrorString(int status) { return "ours"; }
"""
TORCH = """
int acmeMultiply(void); int acmeVersioned(void); const char* acmeGetErrorString(int status);
int multiply(void) { return acmeMultiply() + acmeVersioned(); }
char first_letter(void) { return acmeGetErrorString(7)[0]; }
"""


@pytest.fixture
def stubs(monkeypatch):
    module = load_script(REPOSITORY / "ci" / "stub_libraries.py", monkeypatch)
    if absent := module.missing_tools():
        pytest.skip(f"this machine has no {', '.join(absent)}")
    return module


@pytest.fixture
def folder(stubs, tmp_path):
    """torch/lib of an environment: a library that needs libacme.so.3, with versioned symbols, and no libacme.so.3."""
    lib, elsewhere = tmp_path / "lib", tmp_path / "elsewhere"
    lib.mkdir()
    elsewhere.mkdir()
    (tmp_path / "vendor.c").write_text(VENDOR)
    (tmp_path / "torch.c").write_text(TORCH)
    (tmp_path / "versions").write_text("ACME_3 { global: acmeVersioned; acmeGetErrorString; };\n")
    vendor, torch = elsewhere / "libacme.so.3", lib / stubs.ROOT_LIBRARY
    flags = ["-Wl,-soname,libacme.so.3", f"-Wl,--version-script={tmp_path / 'versions'}"]
    for command in (
        ["gcc", "-shared", "-fPIC", *flags, "-o", vendor, tmp_path / "vendor.c"],
        ["gcc", "-shared", "-fPIC", "-Wl,-rpath,$ORIGIN", "-o", torch, tmp_path / "torch.c", vendor],
    ):
        subprocess.run([str(part) for part in command], check=True)
    return lib


def call(folder, name, function):
    """Result of a library function, called in a new process because a process loads a library only once."""
    program = f"import ctypes; print(ctypes.CDLL({str(folder / name)!r}).{function}())"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def test_a_library_with_missing_dependencies_can_be_loaded_with_stubs(stubs, folder):
    with pytest.raises(OSError, match=r"libacme\.so\.3"):
        ctypes.CDLL(str(folder / stubs.ROOT_LIBRARY))
    assert stubs.make_stubs(folder) == {"libacme.so.3": 3}
    assert call(folder, stubs.ROOT_LIBRARY, "multiply").stdout.strip() == "200", "each says that there is no device"


def test_a_stub_that_formats_errors_returns_a_text(stubs, folder):
    stubs.make_stubs(folder)
    assert call(folder, stubs.ROOT_LIBRARY, "first_letter").stdout.strip() == str(ord("a"))


def test_a_second_run_creates_the_same_stubs(stubs, folder):
    assert stubs.make_stubs(folder) == stubs.make_stubs(folder)


def test_a_stub_that_cannot_be_created_is_an_error_that_says_why(stubs, folder, monkeypatch, tmp_path, capsys):
    assert stubs.main([str(tmp_path)]) == 1
    assert "expected the folder torch/lib" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    assert stubs.main([str(folder)]) == 1
    assert "no gcc and no objdump and no nm" in capsys.readouterr().err

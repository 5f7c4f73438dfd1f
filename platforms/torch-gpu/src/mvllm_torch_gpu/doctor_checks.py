"""Checks of `mvllm doctor` that all platforms of this package share. Imports no torch."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sysconfig
from pathlib import Path

from mvllm.plugin_api import Check, CheckStatus, install_command


def kernels_check(platform: str) -> Check:
    """Whether Triton and its kernels are installed.

    Args:
        platform: Name of the platform, in lower case.
    """
    name = f"platform.{platform}.kernels"
    missing = [module for module in ("triton", "mvllm_triton") if importlib.util.find_spec(module) is None]
    if missing:
        found = f"Attention runs in plain torch, which is many times slower: {', '.join(missing)} not installed."
        remedies = []
        if "mvllm_triton" in missing:
            remedies.append(f"Run: {install_command('mvllm-triton-kernels')}.")
        if "triton" in missing:
            command = install_command("torch", reinstall=True, torch_backend="auto")
            remedies.append(f"Triton comes with torch's build for the device. Run: {command}")
        return Check(name, CheckStatus.WARNING, found, " ".join(remedies))
    return Check(name, CheckStatus.OK, "Triton and the kernels are installed.")


def compiler_check(platform: str) -> Check:
    """Whether Triton finds what it compiles its launchers with, at the first kernel: a C compiler and Python's headers.

    Args:
        platform: Name of the platform, in lower case.
    """
    name = f"platform.{platform}.compiler"
    compiler, header = c_compiler(), python_header()
    missing = [] if compiler is not None else ["a C compiler (gcc or clang, or the one in CC)"]
    missing += [] if header.is_file() else [f"Python's headers ({header})"]
    if not missing:
        return Check(name, CheckStatus.OK, f"Triton can compile: {compiler}, with Python's headers.")
    found = f"Triton compiles code when the first kernel runs, which needs {' and '.join(missing)}."
    remedy = "Install them: on Debian and Ubuntu gcc and python3-dev (for this version of Python), on Fedora gcc and "
    remedy += "python3-devel."
    return Check(name, CheckStatus.BROKEN, found, remedy)


def c_compiler() -> str | None:
    """The C compiler that Triton would run: that in CC, else gcc, else clang; None if it does not exist."""
    named = os.environ.get("CC")
    if named is None:
        return shutil.which("gcc") or shutil.which("clang")
    try:
        program = shlex.split(named)[:1]
    except ValueError:
        return None
    return shutil.which(program[0]) if program else None


def python_header() -> Path:
    """Python.h in the folder where Triton expects it."""
    scheme = sysconfig.get_default_scheme()
    # On Debian, the folder of this scheme has no headers; Triton takes the other one, too.
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    return Path(sysconfig.get_paths(scheme=scheme)["include"]) / "Python.h"


def torch_check(platform: str, problem: tuple[str, str] | None, found: str) -> Check:
    """Whether the installed torch can use the platform's devices.

    Args:
        platform: Name of the platform, in lower case.
        problem: Why torch cannot use the devices, and the remedy; None if it can.
        found: Text of the check without a problem.
    """
    name = f"platform.{platform}.torch"
    return Check(name, CheckStatus.OK, found) if problem is None else Check(name, CheckStatus.BROKEN, *problem)

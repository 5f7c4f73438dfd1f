"""Compiles a replacement of NVML (nvml_library.c) and describes machines with NVIDIA devices to it."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("nvml_library.c")
VARIABLE = "NVML_STAND_IN"
GIB = 1 << 30

A100 = "device|NVIDIA A100-SXM4-80GB|GPU-aa{n}00000-0000-0000-0000-00000000000{n}|85899345920|85000000000|8.0"
T4 = "device|Tesla T4|GPU-bb{n}00000-0000-0000-0000-00000000000{n}|16106127360|16000000000|7.5"
L4 = "device|NVIDIA L4|GPU-ee{n}00000-0000-0000-0000-00000000000{n}|24152899584|24000000000|8.9"
SPARK = "device|NVIDIA GB10|GPU-cc{n}00000-0000-0000-0000-00000000000{n}|0|0|12.1"
MIG = "mig|NVIDIA A100 MIG 1g.10gb|MIG-dd{n}00000-0000-0000-0000-00000000000{n}|10737418240|{n}|0"
DRIVER = "driver|580.65.06|13000"


def uuid_of(line: str) -> str:
    """The UUID in a line of a machine's description."""
    return line.split("|")[2]


@functools.cache
def library() -> Path:
    """The compiled replacement, with the file name of the driver's library."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("the stand-in for the driver's library needs a C compiler")
    path = Path(tempfile.mkdtemp(prefix="nvml-stand-in-")) / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", path, SOURCE], check=True)
    return path


def describe(folder: Path, *lines: str) -> Path:
    """Writes the file that describes a machine; the default driver is that of CUDA 13.0."""
    text = [*lines] if any(line.startswith("driver|") for line in lines) else [DRIVER, *lines]
    path = folder / "machine.txt"
    path.write_text("".join(f"{line}\n" for line in text))
    return path


def environment(folder: Path, *lines: str) -> dict[str, str]:
    """Environment variables for a process that sees this machine."""
    return {VARIABLE: str(describe(folder, *lines)), "LD_LIBRARY_PATH": str(library().parent)}

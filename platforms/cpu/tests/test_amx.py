"""Products with emulated AMX tiles, and where AMX is chosen. test_sanitizers.py tests all kernels with emulated tiles.

The address sanitizer sees the accesses of emulated tiles, but not those of the real ones.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from platforms.cpu.tests.instruction_sets import features

from mvllm_cpu import kernels

HERE = Path(__file__).resolve().parent
CSRC = HERE.parent / "csrc"
SANITIZED = ["-O1", "-g1", "-std=c++17", "-fopenmp", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
INSTRUCTIONS = ("ldtilecfg", "tilerelease", "tilezero", "tileloadd", "tilestored", "tdpbf16ps")


def compiler() -> str:
    found = shutil.which("g++")
    if found is None:
        pytest.skip("no g++ to build with")
    return found


def test_products_with_emulated_tiles_are_correct_for_any_shape(tmp_path):
    sources = [CSRC / "amx_linear.cpp", CSRC / "linear.cpp", CSRC / "thread_team.cpp", HERE / "amx_products.cpp"]
    program = tmp_path / "products"
    command = [compiler(), *SANITIZED, "-DMVLLM_AMX_EMULATED=1", f"-I{CSRC}", *map(str, sources), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if built.returncode and "asan" in built.stderr:
        pytest.skip("this g++ comes without the address sanitizer")
    assert built.returncode == 0, built.stderr
    env = {**os.environ, "OMP_NUM_THREADS": "2", "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([str(program)], env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) > 100_000


@pytest.mark.skipif(platform.machine() != "x86_64" or platform.system() != "Linux", reason="AMX is x86's; Linux's here")
def test_the_library_contains_the_amx_instructions(tmp_path):
    listing = tmp_path / "amx_linear.s"
    command = [compiler(), "-O3", "-std=c++17", "-fopenmp", "-S", str(CSRC / "amx_linear.cpp"), "-o", str(listing)]
    subprocess.run(command, check=True, timeout=300)
    text = listing.read_text()
    assert all(name in text for name in INSTRUCTIONS)


CHOICES = """
import os, sys
from mvllm_cpu import kernels

for name in sys.argv[1:]:
    if (pid := os.fork()) == 0:  # a process loads the library once
        os.environ["MVLLM_CPU_ISA"] = name
        print(kernels.load().isa, kernels.load().quantized_isa, flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""


def test_amx_is_the_default_exactly_where_the_processor_has_it():
    if kernels.load().library is None:
        pytest.skip(f"no kernels: {kernels.load().reason}")
    names = ("", "amx_bf16", "amx_int8", "avx512_bf16")
    command = [sys.executable, "-c", CHOICES, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    *by_name, without = [[isa.startswith("amx") for isa in line.split()] for line in done.stdout.splitlines()]
    expected = [{"avx512_bf16", "amx_tile", product} <= features() for product in ("amx_bf16", "amx_int8")]
    assert by_name == [expected] * 3
    assert without == [False, False]

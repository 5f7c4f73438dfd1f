"""Runs every kernel with edge shapes, compiled with the address and undefined-behaviour sanitizers.

The library is built for one instruction set at a time and loaded by a new process that runs `edge_shapes.py`, with the
sanitizer's runtime preloaded. By default only this processor's instruction set is tested, with small register tiles and
without optimization, and with the address sanitizer only, which compiles four times faster.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from platforms.cpu.tests.instruction_sets import skip_unless_supported

from mvllm_cpu import kernels

CSRC = Path(__file__).resolve().parents[1] / "csrc"
FLAGS = ["-g1", "-std=c++17", "-fopenmp", "-fPIC", "-fno-sanitize-recover=all"]
ISA = kernels.load().isa or "generic"
ISAS = sorted(path.stem.removeprefix("isa_") for path in CSRC.glob("isa_*.cpp"))


def runtime(compiler: str) -> Path:
    """Path of the address sanitizer's runtime library."""
    found = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    return Path(found.stdout.strip())


def build(compiler: str, isa: str, folder: Path, *, whole: bool) -> Path:
    """Builds the library with one instruction set, and the generic one if this processor may lack the former."""
    names = {isa} | ({"generic"} if isa != ISA else set()) | ({"avx512_bf16"} if isa.startswith("amx") else set())
    wanted = {kind + name for kind in ("isa_", "qisa_") for name in names}
    sanitizers = "-fsanitize=address,undefined" if whole else "-fsanitize=address"
    flags = [*FLAGS, sanitizers, *(["-O1"] if whole else ["-O0", "-DMVLLM_SMALL_TILES=1"])]

    def compile_one(source: Path) -> Path:
        target = folder / f"{source.stem}.o"
        subprocess.run([compiler, *flags, "-c", str(source), "-o", str(target)], check=True, timeout=600)
        return target

    sources = [path for path in CSRC.glob("*.cpp") if "isa_" not in path.stem or path.stem in wanted]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [str(path) for path in pool.map(compile_one, sources)]
    library = folder / "sanitized.so"
    subprocess.run([compiler, *FLAGS, sanitizers, "-shared", *objects, "-o", str(library)], check=True, timeout=600)
    return library


@pytest.mark.slow
@pytest.mark.parametrize(
    ("isa", "whole"),
    [
        pytest.param(ISA, False, id=f"{ISA}-small-tiles"),
        *(pytest.param(isa, True, marks=pytest.mark.exhaustive, id=isa) for isa in ISAS),
    ],
)
def test_no_kernel_accesses_memory_out_of_bounds_or_has_undefined_behaviour(isa, whole, tmp_path, request):
    skip_unless_supported(isa)
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to build with")
    asan = runtime(compiler)
    if not asan.is_absolute():
        pytest.skip("this g++ comes without the address sanitizer")
    environment = {
        **os.environ,
        "LD_PRELOAD": str(asan),
        "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0",  # leaks of the Python interpreter are ignored
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "MVLLM_CPU_KERNELS": str(build(compiler, isa, tmp_path, whole=whole)),
        "MVLLM_CPU_ISA": isa,
        "PYTHONPATH": os.pathsep.join([str(request.config.rootpath), *sys.path]),
    }
    script = Path(__file__).with_name("edge_shapes.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert done.stdout.split()[-1] == isa

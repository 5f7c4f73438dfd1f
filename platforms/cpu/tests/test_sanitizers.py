"""Runs every kernel with edge shapes, compiled with the address and undefined-behaviour sanitizers.

The library is built for one instruction set at a time and loaded by a new process that runs `edge_shapes.py`, with the
sanitizer's runtime preloaded. All are exhaustive tests: run them after changes to the C++ sources. The first ones have
this processor's instruction set alone, with small register tiles and without optimization, and the address sanitizer
only, which compiles four times faster. The address sanitizer does not see the accesses of AMX tiles. So on a processor
whose vectors are those used with the tiles this library has emulated tiles, too, and a second test runs kernels with
them.

Compiling takes most of the time, so the library of the default tests is kept in `build/sanitized` under a hash of its
sources, and built when they change.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from platforms.cpu.tests.instruction_sets import skip_unless_supported
from platforms.cpu.tests.test_other_instruction_sets import TESTS_WITH_ISA

from mvllm_cpu import kernels
from tests.helpers.plugins import ROOT

HERE = Path(__file__).resolve().parent
CSRC = HERE.parent / "csrc"
FLAGS = ["-g1", "-std=c++17", "-fopenmp", "-fPIC", "-fno-sanitize-recover=all"]
ISA = kernels.load().isa or "generic"
ISAS = sorted(path.stem.removeprefix("isa_") for path in CSRC.glob("isa_*.cpp"))
VECTORS = "avx512_bf16"
"""Instruction set of the vectors used with AMX tiles."""
EMULATED = "MVLLM_AMX_EMULATED=2"


def runtime(compiler: str) -> Path:
    """Path of the address sanitizer's runtime library."""
    found = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    return Path(found.stdout.strip())


def compiler_with_sanitizer() -> str:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to build with")
    if not runtime(compiler).is_absolute():
        pytest.skip("this g++ comes without the address sanitizer")
    return compiler


def build(compiler: str, isa: str, folder: Path, *, whole: bool, emulated: bool = False) -> Path:
    """Builds the library with one instruction set, and the generic one if this processor may lack the former."""
    names = {isa} | ({"generic"} if isa != ISA else set()) | ({VECTORS} if isa.startswith("amx") else set())
    wanted = {kind + name for kind in ("isa_", "quantized_isa_") for name in names}
    sanitizers = "-fsanitize=address,undefined" if whole else "-fsanitize=address"
    flags = [*FLAGS, sanitizers, *([] if whole else ["-DMVLLM_SMALL_TILES=1"])]
    flags += [f"-D{EMULATED}"] if emulated else []

    def compile_one(source: Path) -> Path:
        target = folder / f"{source.stem}.o"
        level = "-O1" if whole or source.stem.startswith("amx_") else "-O0"  # emulated tiles are slow without it
        subprocess.run([compiler, *flags, level, "-c", str(source), "-o", str(target)], check=True, timeout=600)
        return target

    sources = [path for path in CSRC.glob("*.cpp") if "isa_" not in path.stem or path.stem in wanted]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [str(path) for path in pool.map(compile_one, sources)]
    library = folder / "sanitized.so"
    subprocess.run([compiler, *FLAGS, sanitizers, "-shared", *objects, "-o", str(library)], check=True, timeout=600)
    return library


@pytest.fixture(scope="module")
def small_tiles(tmp_path_factory) -> Path:
    """The library with small register tiles, of `VECTORS` and emulated AMX tiles if this processor's vectors are those;
    else of its own instruction set.
    """
    compiler, kept = compiler_with_sanitizer(), ROOT / "build" / "sanitized"
    library = kept / f"{hash_of_sources(compiler)}.so"
    if not library.exists():
        built = build(compiler, ISA, tmp_path_factory.mktemp("small-tiles"), whole=False, emulated=ISA == VECTORS)
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(parents=True, exist_ok=True)
        partial = library.with_suffix(f".{os.getpid()}")
        shutil.copy(built, partial)
        partial.replace(library)
    return library


def hash_of_sources(compiler: str) -> str:
    """A hash of all that the library depends on: sources, this file with its flags, compiler and instruction set."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True)
    digest = hashlib.sha256(version.stdout + f"{platform.machine()} {ISA}".encode())
    for path in (Path(__file__), *sorted(CSRC.rglob("*"))):
        if path.is_file():
            digest.update(f"{path.name} ".encode() + path.read_bytes())
    return digest.hexdigest()


def run(library: Path, isa: str, request, *command: object) -> str:
    """Runs a Python program with the library, whose instruction set is `isa`; returns its output."""
    env = {
        **os.environ,
        "LD_PRELOAD": str(runtime(compiler_with_sanitizer())),
        "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0",  # leaks of the Python interpreter are ignored
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "MVLLM_CPU_KERNELS": str(library),
        "MVLLM_CPU_ISA": isa,
        "PYTHONPATH": os.pathsep.join([str(request.config.rootpath), *sys.path]),
    }
    program = [sys.executable, *map(str, command)]
    done = subprocess.run(program, env=env, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.exhaustive  # a minute of a core
@pytest.mark.parametrize("isa", [pytest.param(ISA, id=f"{ISA}-small-tiles")])
def test_no_kernel_accesses_memory_out_of_bounds(isa, small_tiles, request):
    assert run(small_tiles, isa, request, HERE / "edge_shapes.py").split()[-1] == isa


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("isa", ISAS)
def test_no_kernel_accesses_memory_out_of_bounds_or_has_undefined_behaviour(isa, tmp_path, request):
    skip_unless_supported(isa)
    library = build(compiler_with_sanitizer(), isa, tmp_path, whole=True)
    assert run(library, isa, request, HERE / "edge_shapes.py").split()[-1] == isa


EDGES = ("attention", "linear", "quantized", "block_quantized", "quantized_experts")
EMULATED_TESTS = ("test_paged_attention.py", "test_quantized_linear.py", "test_block_quantized_linear.py")


def edges_and_tests(edges: tuple[str, ...]) -> str:
    """One process, because the import of torch is slow with the sanitizer."""
    return f"""
import torch
from platforms.cpu.tests import edge_shapes

torch.set_num_threads(2)
for name in {edges}:
    getattr(edge_shapes, name)()
{TESTS_WITH_ISA}"""


EVERY_NTH = "24"
"""Every case of each test that runs: emulated tiles are slow."""
SLOWEST = ("prompts_of_many_tiles", "cache_of_another_dtype", "values_that_are_the_first", "long_latent_context")
"""Tests with many tiles: half of the time. `edge_shapes.attention` has the same kinds of caches and tiles."""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_kernels_with_emulated_tiles_are_correct_and_stay_in_bounds(small_tiles, tmp_path, request):
    run_with_emulated_tiles(small_tiles, tmp_path, request, EDGES, EMULATED_TESTS, without=SLOWEST)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_kernels_with_emulated_tiles_are_correct_for_many_tiles(small_tiles, tmp_path, request):
    run_with_emulated_tiles(small_tiles, tmp_path, request, (), EMULATED_TESTS, only=SLOWEST)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_emulated_tiles_attend_in_both_directions(small_tiles, tmp_path, request):
    run_with_emulated_tiles(small_tiles, tmp_path, request, ("both_directions",), ("test_encoder_attention.py",))


def run_with_emulated_tiles(library, tmp_path, request, edges, files, *, without=(), only=()):
    skip_unless_supported(VECTORS)
    if ISA != VECTORS:  # a processor with AMX: its own library has no emulated tiles
        library = build(compiler_with_sanitizer(), VECTORS, tmp_path, whole=False, emulated=True)
    tests = [str(HERE / name) for name in files]
    chosen = " and ".join(f"not {name}" for name in ("instruction_sets_agree", "no_thread_can_be_started", *without))
    if only:
        chosen += f" and ({' or '.join(only)})"
    program = edges_and_tests(edges)
    lines = run(library, "amx_bf16", request, "-c", program, EVERY_NTH, *tests, "-k", chosen).splitlines()
    assert lines[0] == "amx_bf16 amx_int8"

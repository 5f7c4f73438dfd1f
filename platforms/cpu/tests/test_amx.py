"""Kernels with emulated AMX tiles, for machines without AMX. With it, the other tests of kernels use the real tiles.

The address sanitizer sees the accesses of emulated tiles, but not those of the real ones.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from platforms.cpu.tests.instruction_sets import NEEDS, features, skip_unless_supported
from platforms.cpu.tests.test_other_instruction_sets import TESTS_WITH_ISA

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


VECTORS = "avx512_bf16"
"""Instruction set of the vectors beside the tiles."""
LIBRARY = ["-O1", "-g1", "-std=c++17", "-fopenmp", "-fPIC", "-fsanitize=address", "-DMVLLM_SMALL_TILES=1"]
EDGES = ("attention", "linear", "quantized", "block_quantized", "quantized_experts")
EMULATED_TESTS = ("test_paged_attention.py", "test_quantized_linear.py", "test_block_quantized_linear.py")
EVERY_NTH = "24"
"""Every case of each test that runs: emulated tiles are slow."""
OFTEN_WITHOUT_AMX = pytest.mark.exhaustive if NEEDS["amx_int8"] <= features() else pytest.mark.slow


def library_with_emulated_tiles(folder: Path) -> Path:
    """The kernels of `VECTORS` and of emulated tiles, with the address sanitizer."""
    flags = [*LIBRARY, "-DMVLLM_AMX_EMULATED=2"]

    def compile_one(source: Path) -> str:
        target = folder / f"{source.stem}.o"
        subprocess.run([compiler(), *flags, "-c", str(source), "-o", str(target)], check=True, timeout=600)
        return str(target)

    wanted = {f"isa_{VECTORS}", f"qisa_{VECTORS}"}
    sources = [path for path in CSRC.glob("*.cpp") if "isa_" not in path.stem or path.stem in wanted]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    library = folder / "emulated.so"
    subprocess.run([compiler(), *flags, "-shared", *objects, "-o", str(library)], check=True, timeout=600)
    return library


@pytest.mark.slow
@OFTEN_WITHOUT_AMX
def test_kernels_with_emulated_tiles_are_correct_and_stay_in_bounds(tmp_path, request):
    skip_unless_supported(VECTORS)
    found = subprocess.run([compiler(), "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    asan = Path(found.stdout.strip())
    if not asan.is_absolute():
        pytest.skip("this g++ comes without the address sanitizer")
    env = {
        **os.environ,
        "LD_PRELOAD": str(asan),
        "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0",
        "MVLLM_CPU_KERNELS": str(library_with_emulated_tiles(tmp_path)),
        "MVLLM_CPU_ISA": "amx_bf16",
        "PYTHONPATH": os.pathsep.join([str(request.config.rootpath), *sys.path]),
    }

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], env=env, capture_output=True, text=True, check=False, timeout=900
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
        return done.stdout

    assert run(str(HERE / "edge_shapes.py"), *EDGES).split()[-1] == "amx_bf16"
    tests = [str(HERE / name) for name in EMULATED_TESTS]
    lines = run(
        "-c", TESTS_WITH_ISA, EVERY_NTH, *tests, "-k", "not instruction_sets_agree and not no_thread_can_be_started"
    )
    assert lines.splitlines()[0] == "amx_bf16 amx_int8"


@pytest.mark.skipif(platform.machine() != "x86_64" or platform.system() != "Linux", reason="AMX is x86's; Linux's here")
def test_the_library_contains_the_amx_instructions(tmp_path):
    listing = tmp_path / "amx_linear.s"
    command = [compiler(), "-O3", "-std=c++17", "-fopenmp", "-S", str(CSRC / "amx_linear.cpp"), "-o", str(listing)]
    subprocess.run(command, check=True, timeout=300)
    text = listing.read_text()
    assert all(name in text for name in INSTRUCTIONS)


def test_amx_is_the_default_exactly_where_the_processor_has_it():
    if kernels.load().library is None:
        pytest.skip(f"no kernels: {kernels.load().reason}")
    ask = "from mvllm_cpu import kernels; print(kernels.load().isa, kernels.load().quantized_isa)"
    env = {name: value for name, value in os.environ.items() if name != "MVLLM_CPU_ISA"}

    def isas(**more: str) -> list[str]:
        command = [sys.executable, "-c", ask]
        done = subprocess.run(command, env={**env, **more}, capture_output=True, text=True, check=True, timeout=60)
        return done.stdout.split()

    expected = [{"avx512_bf16", "amx_tile", product} <= features() for product in ("amx_bf16", "amx_int8")]
    for name in ("", "amx_bf16", "amx_int8"):
        assert [isa.startswith("amx") for isa in isas(MVLLM_CPU_ISA=name)] == expected
    assert not any(isa.startswith("amx") for isa in isas(MVLLM_CPU_ISA="avx512_bf16"))

"""The kernels on 64-bit Arm: cross-compiled, and run in an emulator with and without bfloat16 dot products."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CSRC = HERE.parent / "csrc"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
FLAGS = ["-O1", "-std=c++17", "-fopenmp", "-DMVLLM_SMALL_TILES=1", f"-I{CSRC}"]
X86 = ("avx", "amx")


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    for tool in (COMPILER, EMULATOR):
        if shutil.which(tool) is None:
            pytest.skip(f"not run: no {tool} (Debian's packages g++-aarch64-linux-gnu and qemu-user have both)")
    folder = tmp_path_factory.mktemp("arm")

    def compile_one(source: Path) -> str:
        target = folder / f"{source.stem}.o"
        command = [COMPILER, *FLAGS, "-c", str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        return str(target)

    sources = [path for path in sorted(CSRC.glob("*.cpp")) if not any(name in path.stem for name in X86)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, [*sources, HERE / "portable_kernels.cpp"]))
    linked = folder / "portable_kernels"
    command = [COMPILER, "-static", "-fopenmp", *objects, "-o", str(linked)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return linked


def run(program: Path, processor: str, *arguments: str, **variables: str) -> tuple[str, str]:
    """The name of the kernels that the program chooses on a processor, and what it found."""
    env = {name: value for name, value in os.environ.items() if name != "MVLLM_CPU_ISA"}
    done = subprocess.run(
        [EMULATOR, "-cpu", processor, str(program), *arguments],
        env=env | {"OMP_NUM_THREADS": "2"} | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    name, _, found = done.stdout.strip().partition(": ")
    return name, found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processor", "isa"),
    [pytest.param("max", "neon_bf16", id="with-bfloat16"), pytest.param("cortex-a57", "generic", id="without")],
)
def test_every_kernel_is_correct_on_arm(program, processor, isa):
    name, found = run(program, processor)
    assert name == isa
    assert int(found.split()[0]) > 100_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processor", "asked"),
    [
        pytest.param("max", "generic", id="generic-is-named"),
        pytest.param("cortex-a57", "neon_bf16", id="named-and-not-there"),
    ],
)
def test_named_kernels_are_chosen_where_the_processor_has_their_instructions(program, processor, asked):
    assert run(program, processor, "name", MVLLM_CPU_ISA=asked) == ("generic", "not run")

"""Every kernel compiles to machine code of absent devices, and fits their shared memory.

Compilation runs in another process, because the test process has Triton with its interpreter, which compiles nothing.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]


PACKED = ("int4-one", "mxfp4-experts-decode", "int4-experts-decode", "float8-codes-experts-decode")
SKINNY_GEMM = ("skinny-gemm-1", "skinny-gemm-16")
LATENTS = ("latent-decode", "latent-prefill")
GFX = ("90a", "942", "950", "1100", "1201")


def compile_launches(tmp_path, targets, *names):
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    command = [sys.executable, "-m", "platforms.triton-kernels.tests.launches", targets, *names]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def few_launches(tmp_path_factory):
    """Lines of some launches; one process imports Triton for all."""
    both = ("decode-64", *PACKED[:2])
    first, latents = (f"{name}@sm_90" for name in ("prefill-64", *SKINNY_GEMM)), (f"{name}@sm_100" for name in LATENTS)
    return compile_launches(tmp_path_factory.mktemp("few"), "sm_90,gfx942", *both, *first, *latents).splitlines()


def kernels(lines):
    """The compiled kernels of attention: by name and target, the numbers that a line prints after a word."""
    found = {}
    for line in lines:
        words = line.split()
        if words[1] in ("paged_attention_decode", "paged_attention_prefill"):
            numbers = dict(pairwise(words[3:]))
            found[words[0], words[2]] = {
                key: None if numbers[key] == "None" else int(numbers[key])
                for key in ("spilled", "copies", "waits", "buffers", "products")
            }
    return found


def check_overlap(found):
    """Tiles of keys and values are in flight while earlier ones are multiplied."""
    for (name, target), kernel in found.items():
        what = f"{name} on {target}: {kernel}"
        if target.startswith("sm_"):
            assert kernel["copies"] > 0 and kernel["waits"] > 0, what
            assert kernel["buffers"] >= 2, what
        else:
            # Triton 3.7 has no asynchronous copies for these targets by default: the next tile is loaded into
            # registers before the products of the current one, and stored to a buffer in shared memory afterwards.
            assert kernel["buffers"] >= 1, what
        if name.startswith("prefill") and target in ("sm_90", "sm_100"):
            assert kernel["products"] > 0, what


def test_loads_of_a_decode_overlap_its_products_for_two_vendors(few_launches):
    found = kernels(line for line in few_launches if line.startswith("decode-64 "))
    assert list(found) == [("decode-64", "sm_90"), ("decode-64", "gfx942")]
    check_overlap(found)


def test_loads_of_a_prefill_overlap_its_products(few_launches):
    found = kernels(line for line in few_launches if line.startswith("prefill-64 "))
    assert list(found) == [("prefill-64", "sm_90")]
    check_overlap(found)


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx942", "gfx950"])
def test_loads_overlap_products_in_every_size(tmp_path, target):
    names = ("decode-128", "decode-512", "decode-codes", "prefill-64", "prefill-128", "prefill-256", "prefill-codes")
    names += ("prefill-spans",)
    check_overlap(kernels(compile_launches(tmp_path, target, *names).splitlines()))


def test_products_of_few_rows_are_read_16_bytes_at_a_time_and_nothing_is_spilled(few_launches):
    lines = [line for line in few_launches if line.startswith("skinny-gemm-")]
    assert [line.split()[:2] for line in lines] == [["skinny-gemm-1", "gemv"], ["skinny-gemm-16", "skinny_gemm"]]
    for line in lines:
        numbers = dict(pairwise(line.split()))
        assert numbers["spilled"] == "0" and int(numbers["copies"]) >= 16, line


def test_attention_has_few_compiled_variants():
    command = [sys.executable, "-m", "platforms.triton-kernels.tests.variants"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    for line in done.stdout.splitlines():
        _, attention, reduction = line.split()
        assert int(attention) <= 7 and int(reduction) <= 9, line


@pytest.mark.parametrize(
    "targets, names",
    [
        ("sm_90,gfx942", PACKED[:2]),
        pytest.param("sm_90,sm_100,gfx942,gfx950", PACKED, marks=pytest.mark.exhaustive),
        pytest.param("sm_90,sm_100,gfx950", ("float8-decode", "float8-experts-decode"), marks=pytest.mark.exhaustive),
    ],
)
def test_packed_weights_are_loaded_16_bytes_at_a_time_and_stay_in_registers(request, tmp_path, targets, names):
    if names == PACKED[:2]:
        found = request.getfixturevalue("few_launches")
    else:
        found = compile_launches(tmp_path, targets, *names).splitlines()
    lines = [line.split() for line in found if line.startswith(tuple(f"{name} " for name in names))]
    products = [line for line in lines if line[1] == "fp8_gemm" or line[1].startswith(("w4a16_", "fused_moe_"))]
    assert {(line[0], line[2]) for line in products} == {
        (name, target) for name in names for target in targets.split(",")
    }
    for line in products:
        found = dict(zip(line[3::2], line[4::2])) if line[5] != "KiB" else dict(zip(line[6::2], line[7::2]))
        sizes = {int(size) for size in found["packed"].split(",")}
        assert min(sizes) >= 16, line
        assert int(found["wide"]) > 0 and found["spilled"] == "0", line


def test_latents_fit_where_products_are_summed_in_tensor_memory_and_nothing_is_spilled(few_launches):
    lines = [line.split() for line in few_launches if line.startswith(LATENTS)]
    assert {line[2] for line in lines} == {"sm_100"}
    numbers = [dict(pairwise(line[3:])) for line in lines if line[1].startswith("mla_")]
    assert len(numbers) == 2 and all(each["spilled"] == "0" and int(each["buffers"]) >= 2 for each in numbers)


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", [*(f"sm_{n}" for n in (80, 86, 89, 90, 100, 103, 120)), *(f"gfx{n}" for n in GFX)])
def test_every_launch_compiles(tmp_path, target):
    assert compile_launches(tmp_path, target)

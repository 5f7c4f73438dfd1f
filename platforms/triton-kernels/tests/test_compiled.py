"""Every kernel compiles to machine code of absent devices, and fits their shared memory.

Compilation runs in another process, because the test process has Triton with its interpreter, which compiles nothing.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


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


def test_a_decode_compiles_for_two_vendors(tmp_path):
    lines = compile_launches(tmp_path, "sm_90,gfx942", "decode-64").splitlines()
    assert [line.split()[1:3] for line in lines] == [["attend", "sm_90"], ["attend", "gfx942"]]


def test_products_of_few_rows_are_read_16_bytes_at_a_time_and_nothing_is_spilled(tmp_path):
    lines = compile_launches(tmp_path, "sm_90", "few-rows-1", "few-rows-16").splitlines()
    assert [line.split()[:2] for line in lines] == [["few-rows-1", "multiply_row"], ["few-rows-16", "multiply"]]
    for line in lines:
        *_, spilled, _, copies = line.split()
        assert spilled == "0" and int(copies) >= 16, line


def test_attention_has_few_compiled_variants():
    command = [sys.executable, "-m", "platforms.triton-kernels.tests.variants"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    for line in done.stdout.splitlines():
        _, attend, combine = line.split()
        assert int(attend) <= 7 and int(combine) <= 9, line


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", [*(f"sm_{n}" for n in (80, 89, 90, 100, 120)), *(f"gfx{n}" for n in GFX)])
def test_every_launch_compiles(tmp_path, target):
    assert compile_launches(tmp_path, target)

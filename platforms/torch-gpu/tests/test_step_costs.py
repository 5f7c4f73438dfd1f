"""Launches and bytes of steps of real models are those of docs/reference/step-costs.md.

They are counted in another process, because the test process has Triton with its interpreter, which launches nothing.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "step-costs.md"

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def rows():
    """By model and step: the numbers of the page, bytes in GB."""
    cells = [line.strip("| ").split(" | ") for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    numbers = {}
    for model, step, *others in (row for row in cells if len(row) == 8 and row[0] != "model"):
        numbers[model, step] = [float(each.replace(",", "").removesuffix(" GB")) for each in others]
    return numbers


@pytest.mark.exhaustive
def test_the_counts_are_those_of_the_page():
    command = [sys.executable, "-m", "platforms.torch-gpu.tests.step_costs", "--check"]
    path = os.pathsep.join([str(ROOT), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


def test_the_floor_of_a_decode_is_the_weights_and_the_cache():
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    weights, head = 2 * 32 * layer, 2 * 128256 * 4096
    cache = 4096 * 32 * 2 * 8 * 128 * 2
    found = rows()
    for requests, name in ((1, "decode, 1 request"), (64, "decode, 64 requests")):
        *_, moved, floor, ratio = found["Llama-3.1-8B", name]
        assert floor == pytest.approx((weights + head + requests * cache) / 1e9, rel=0.002)
        assert ratio == pytest.approx(moved / floor, abs=0.006)
    assert len(found) == 12 and all(numbers[-1] >= 1.0 for numbers in found.values())

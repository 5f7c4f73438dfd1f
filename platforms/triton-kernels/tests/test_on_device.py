"""The parts of on_device.py that run without a device: numerics on the interpreter, the rest without computing."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]

# Calls every measured function once, on tensors without content; launches are recorded, not executed.
DRY_RUN = """
import importlib, torch
torch.cuda.is_available = lambda: True
compiled = importlib.import_module("platforms.triton-kernels.tests.compiled")
on_device = importlib.import_module("platforms.triton-kernels.tests.on_device")
on_device.seconds = lambda function, repeats=20: function() is None or 1e-3
with compiled.launches() as caught:
    on_device.speed("meta")
    on_device.tiles("meta")
print(len(caught), "launches")
"""


def run(*arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


def test_numerics_are_right_on_the_interpreter():
    assert run("-m", "platforms.triton-kernels.tests.on_device").endswith("all right\n")


def test_every_measured_function_can_be_called():
    lines = run("-c", DRY_RUN).splitlines()
    assert lines[0].startswith("limits: copy")
    assert any("decode, batch 256, 8192 tokens" in line and "of copy" in line for line in lines)
    assert any("prefill of 8192" in line for line in lines)
    assert int(lines[-1].split()[0]) > 100

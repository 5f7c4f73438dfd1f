"""Launches of real models compile for absent devices, fit their shared memory, and spill no more than is listed.

They are compiled in another process, because the test process has Triton with its interpreter.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

importlib.import_module("platforms.torch-gpu.tests.interpreted")  # skips without Triton

ROOT = Path(__file__).parents[3]
MODELS = json.loads((Path(__file__).parent / "meta_models.json").read_text("utf-8"))
real_launches = importlib.import_module("platforms.torch-gpu.tests.real_launches")


def test_a_spill_is_allowed_for_the_listed_kernel_targets_and_constants_only():
    def attend():
        pass

    attend.__module__ = "kernels.attention"
    function = types.SimpleNamespace(fn=attend, __name__="attend")
    entries = [{"kernel": "attention.attend", "targets": ["sm_90"], "constants": {"GROUP": 128}, "bytes": 400}]

    def allowed(target, **constants):
        launch = types.SimpleNamespace(function=function, constants=constants, options={"num_warps": 4})
        return real_launches.allowed_spill(launch, target, entries)

    assert allowed("sm_90", GROUP=128, HEADS=4) == 400
    assert allowed("sm_90", GROUP=16) == allowed("sm_80", GROUP=128) == 0


def test_listed_spills_have_known_targets_and_a_reason():
    entries = json.loads(real_launches.SPILLS.read_text("utf-8"))
    for entry in entries:
        assert set(entry["targets"]) <= set(real_launches.DEVICES) and entry["bytes"] > 0 and entry["reason"]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("target", real_launches.DEVICES)
def test_launches_of_real_models_compile_and_fit(tmp_path, target, model):
    path = os.pathsep.join([str(ROOT), *sys.path])
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": path, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "platforms.torch-gpu.tests.real_launches", target, model]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert " attend " in done.stdout

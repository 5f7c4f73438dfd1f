"""The example device replays every step: in steady state no kernel is launched outside of a replay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.plugins import ROOT, example_platform_path

KINDS = ("hybrid", "hybrid-lora-verify", "mtp")
MORE = ("decode", "mixed", "verify", "lora", "lora-verify", "structured", "structured-verify", "window", "hybrid-mtp")


@pytest.mark.parametrize("kinds", [KINDS, pytest.param(MORE, marks=pytest.mark.exhaustive)], ids=["few", "more"])
def test_no_kernel_runs_outside_of_a_replay_in_steady_state(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    path = os.pathsep.join([*example_platform_path(tmp_path), *(folder for folder in sys.path if folder)])
    settings = ("FAULT_INJECTION", "MVLLM_EXAMPLE_DEVICES", "MVLLM_EXAMPLE_MEMORY")
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.example_device_replay", *kinds],
        env={**{name: value for name, value in os.environ.items() if name not in settings}, "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.splitlines()[-len(kinds) :] == [f"{kind} replays everything" for kind in kinds]

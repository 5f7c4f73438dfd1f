"""Tests of ci/times.py, a pytest plugin that prints and saves the duration and CPU time of every test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.plugins import ROOT

pytestmark = pytest.mark.fresh_programs

TEST_MODULE = """
import subprocess, sys, time
def test_that_uses_cpu():
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
def test_whose_child_uses_cpu():
    code = "import time\\nwhile time.process_time() < 0.4: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
"""


@pytest.mark.parametrize("workers", [[], ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]])
def test_times_are_recorded_and_the_file_with_more_tests_runs_first(tmp_path: Path, workers: list[str]) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_a_sleep.py").write_text("import time\ndef test_that_sleeps():\n    time.sleep(0.3)\n")
    (tmp_path / "test_cpu.py").write_text(TEST_MODULE)
    pytest_command = [sys.executable, "-m", "pytest", "-v", "-c", str(tmp_path / "pytest.ini"), str(tmp_path)]
    result = subprocess.run(
        [*pytest_command, "-p", "ci.times", "--times", str(tmp_path / "times.json"), *workers],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    recorded = json.loads((tmp_path / "times.json").read_text())["spent"]
    spent = {name.split("::")[1]: pair for name, pair in recorded.items()}
    assert spent["test_that_uses_cpu"][1] >= 0.3 and spent["test_whose_child_uses_cpu"][1] >= 0.4
    assert spent["test_that_sleeps"][0] >= 0.3 > spent["test_that_sleeps"][1]
    table = result.stdout[result.stdout.index("where the time went") :]
    assert table.index("test_cpu.py") < table.index("test_a_sleep.py")
    assert workers or result.stdout.index("test_that_uses_cpu") < result.stdout.index("test_that_sleeps")

"""ci/times.py: the table has the times of all workers, and slow files run first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.plugins import ROOT

PROGRAM = """
import subprocess, sys, time
def test_that_burns():
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
def test_whose_child_burns():
    code = "import time\\nwhile time.process_time() < 0.4: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
"""


@pytest.mark.parametrize("workers", [[], ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]])
def test_each_file_has_its_seconds_and_the_one_with_more_tests_comes_first(tmp_path: Path, workers: list[str]) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_a_nap.py").write_text("import time\ndef test_that_sleeps():\n    time.sleep(0.3)\n")
    (tmp_path / "test_fire.py").write_text(PROGRAM)
    pytest_here = [sys.executable, "-m", "pytest", "-v", "-c", str(tmp_path / "pytest.ini"), str(tmp_path)]
    done = subprocess.run(
        [*pytest_here, "-p", "ci.times", "--times", str(tmp_path / "times.json"), *workers],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "times.json").read_text())["spent"]
    spent = {name.split("::")[1]: pair for name, pair in written.items()}
    assert spent["test_that_burns"][1] >= 0.3 and spent["test_whose_child_burns"][1] >= 0.4
    assert spent["test_that_sleeps"][0] >= 0.3 > spent["test_that_sleeps"][1]
    table = done.stdout[done.stdout.index("where the time went") :]
    assert table.index("test_fire.py") < table.index("test_a_nap.py")
    assert workers or done.stdout.index("test_that_burns") < done.stdout.index("test_that_sleeps")

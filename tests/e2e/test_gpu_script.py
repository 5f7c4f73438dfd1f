"""`python -m tests.gpu` on the CPU platform: short runs of a script that is made for machines with a device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.result_log import OK, ResultLog, Row
from tests.gpu.settings import ROOT


def run(folder: Path, parts: list[str], items: list[str]) -> dict[str, Row]:
    """The rows of a quick run, by name; asserts that none failed, and prints the table."""
    command = [sys.executable, "-m", "tests.gpu", *parts, "--platform", "cpu", "--quick", "--out", str(folder)]
    for item in items:
        command += ["--only", item]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    logs = "".join(log.read_text() for log in (folder / "logs").glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    assert (folder / "table.md").read_text() in done.stdout
    return {row.name: row for row in ResultLog(folder).rows()}


def test_results_are_compared_with_the_limits_of_the_same_run(tmp_path: Path) -> None:
    rows = run(tmp_path, ["environment", "bench"], ["platform", "ceilings", "tiny:engine"])
    assert rows["platform cpu"].status == OK
    decode = rows["tiny: decode, batch 4"].figures
    assert decode["step_ms"] > 0 and 0 < decode["of_bandwidth"] < 1
    assert rows["tiny: offline throughput"].figures["num_requests"] == 12


@pytest.mark.exhaustive
def test_parity_and_execution_modes(tmp_path: Path) -> None:
    rows = run(tmp_path, ["parity", "graphs"], ["llama-gqa"])
    assert len(rows) == 12 and {row.status for row in rows.values()} == {OK}
    assert rows["llama-gqa:bfloat16"].figures["within"] == 1.0

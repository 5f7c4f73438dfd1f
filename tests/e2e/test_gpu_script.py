"""`python -m tests.gpu` without a device: short runs of a script that is made for machines with one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mvllm.installable import part_versions
from tests.gpu.archive import ARCHIVE
from tests.gpu.parts import load
from tests.gpu.presets import PRESETS
from tests.gpu.result_log import FAILED, NOT_RUN, OK, ResultLog, Row
from tests.gpu.settings import ROOT, Settings

WITHOUT_TIME = """
import sys
from tests.gpu.__main__ import main
from tests.gpu.clock import Clock

sys.exit(main(sys.argv[1:], Clock(monotonic=lambda: 0.0, advances=False)))
"""
"""A run on whose clock no time passes: no item is cut off, however slow the machine is."""


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


def needs(*names: str) -> pytest.MarkDecorator:
    """Skips where a package is missing that the parts of tests.gpu use."""
    lacking = [f"mvllm-{name}" for name in names if part_versions()[name] is None]
    return pytest.mark.skipif(bool(lacking), reason=f"{' and '.join(lacking)} are not installed")


@needs("bench")
def test_results_are_compared_with_the_limits_of_the_same_run(tmp_path: Path) -> None:
    rows = run(tmp_path, ["environment", "bench"], ["platform", "ceilings", "tiny:engine"])
    assert rows["platform cpu"].status == OK
    decode = rows["tiny: decode, batch 4"].figures
    assert decode["step_ms"] > 0 and 0 < decode["of_bandwidth"] < 1
    assert rows["tiny: offline throughput"].figures["num_requests"] == 12


@pytest.mark.exhaustive
def test_parity_and_execution_modes(tmp_path: Path) -> None:
    rows = run(tmp_path, ["parity", "graphs"], ["llama-gqa"])
    assert len(rows) == 16 and {row.status for row in rows.values()} == {OK}
    assert rows["llama-gqa:bfloat16"].figures["within"] == 1.0


@pytest.mark.exhaustive
@needs("bench", "conformance", "graph")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("platform", ["interpreted", "replayed"])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_runs_whole_without_a_device(preset: str, platform: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TIME, "--preset", preset, "--platform", platform, "--quick"]
    done = subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    rows = ResultLog(tmp_path).rows()
    failed = [f"{row.part} {row.name}: {row.note}" for row in rows if row.status == FAILED]
    assert done.returncode == 0 and not failed, f"{failed}\n{done.stderr}"
    settings = Settings(platform, tmp_path, tmp_path, 0.0, quick=True)
    expected = {
        (step.part, item.name)
        for step in PRESETS[preset].steps
        for item in load(step.part).items(settings)
        if step.wants(item) and item.obstacle
    }
    assert {(row.part, row.item) for row in rows if row.status == NOT_RUN} == expected
    assert (tmp_path / ARCHIVE).stat().st_size < 16 << 20

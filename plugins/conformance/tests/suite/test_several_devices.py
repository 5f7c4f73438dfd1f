"""Clauses about workers of several devices, on a test platform that satisfies them and violates them on request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mvllm_conformance.suite.test_several_devices import *  # noqa: F403
from tests.helpers.multi_device_plugin import FAULT, VARIABLE
from tests.helpers.plugins import multi_device_platform_path

CLAUSES = ("DEV-09", "MEM-05", "KVL-06", "RUN-03")
"""tests/engine/test_several_devices.py tests whole engines."""


def run_suite(folder: Path, fault: str, clauses: tuple[str, ...]) -> dict[str, str]:
    """The suite's status of each clause, in the order of the contract's page."""
    path = os.pathsep.join([*multi_device_platform_path(folder), *(entry for entry in sys.path if entry)])
    report = folder / "report.json"
    command = [*["-m", "mvllm.entrypoints.cli.main", "conformance", "--quick", "--platform", "several"]]
    done = subprocess.run(
        [sys.executable, *command, "--only", ",".join(clauses), "--report", str(report)],
        env={**os.environ, "PYTHONPATH": path, VARIABLE: "2", FAULT: fault},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert report.exists(), (done.stdout + done.stderr)[-3000:]
    found = json.loads(report.read_text(encoding="utf-8"))["clauses"]
    return {name: clause["status"] for name, clause in found.items() if name in clauses}


@pytest.mark.timeout(700)
@pytest.mark.exhaustive
def test_a_platform_with_several_devices_per_worker_keeps_the_clauses(tmp_path: Path) -> None:
    found = run_suite(tmp_path, "", (*CLAUSES, "E2E-03"))
    assert found == {**dict.fromkeys(CLAUSES, "passed"), "E2E-03": "not claimed"}


@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    ("fault", "clause"),
    [
        ("place", "DEV-09"),
        pytest.param("copies", "DEV-09", marks=pytest.mark.exhaustive),
        pytest.param("order", "DEV-09", marks=pytest.mark.exhaustive),
        pytest.param("memory", "MEM-05", marks=pytest.mark.exhaustive),
        pytest.param("cache", "KVL-06", marks=pytest.mark.exhaustive),
        pytest.param("weights", "RUN-03", marks=pytest.mark.exhaustive),
    ],
)
def test_the_first_clause_that_fails_names_the_fault(tmp_path: Path, fault: str, clause: str) -> None:
    found = run_suite(tmp_path, fault, CLAUSES[: CLAUSES.index(clause) + 1])
    assert [name for name, status in found.items() if status == "failed"] == [clause], found

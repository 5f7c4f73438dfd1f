"""The suite's own test: a device with one thing broken fails the clause that names the fault, and none before it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.mutants import MUTANTS, failing, unchanged
from tests.helpers.plugins import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1600)]

UNCHANGED = [mutant for mutant, _ in unchanged()]


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the suite says about each of them, by number."""
    folder = tmp_path_factory.mktemp("mutants")
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("MVLLM_", "FAULT_INJECTION"))}
    path = os.pathsep.join(folder for folder in sys.path if folder)
    done = subprocess.run(
        [sys.executable, "-m", "tests.conformance.mutants", str(folder)],
        env={**ours, "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("number", range(len(UNCHANGED)), ids=[mutant.name for mutant in UNCHANGED])
def test_the_device_as_it_is_fails_nothing(examined: Path, number: int) -> None:
    assert failing(examined / str(number)) == []


@pytest.mark.parametrize("number", range(len(MUTANTS)), ids=[mutant.name for mutant in MUTANTS])
def test_the_first_clause_that_fails_names_the_fault(examined: Path, number: int) -> None:
    mutant, found = MUTANTS[number], failing(examined / str(len(UNCHANGED) + number))
    assert found[:1] == [mutant.clause], f"failed, in order: {found}"

"""Tests of the conformance suite: on a device with one fault, the first failing clause names the fault."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from plugins.conformance.tests.suite import mutant_runs
from plugins.conformance.tests.suite.mutant_runs import statuses, unchanged
from plugins.conformance.tests.suite.mutants import MUTANTS

from tests.helpers.plugins import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1600)]

UNCHANGED = unchanged()


COSTLY = {"COM-04", "COM-08", "COM-09", "E2E-01", "LIF-05", "STA-07"}
"""Clauses whose mutants start processes or engines, and that are covered by others of the same family."""


def places() -> Iterator[ParameterSet]:
    """Indices of all mutants. Exhaustive tests only: further mutants of the same clause, slow ones, and most of
    the clauses. The others detect a general fault of the suite."""
    seen: list[str] = []
    for number, mutant in enumerate(MUTANTS):
        if is_new := mutant.clause not in seen:
            seen.append(mutant.clause)
        further = not is_new or mutant.clause in COSTLY or len(seen) % 64 != 1
        yield pytest.param(number, id=mutant.name, marks=pytest.mark.exhaustive if further else ())


@pytest.fixture(scope="module")
def chosen(request: pytest.FixtureRequest) -> set[int] | None:
    """Indices of the mutants whose tests are selected; None if only the test of the unmodified device is."""
    return {
        item.callspec.params["number"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.function
        is test_the_first_clause_that_fails_names_the_fault  # another file has a test of the same name
    } or None


@pytest.fixture(scope="module")
def examined(chosen: set[int] | None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the suite's results for the selected mutants, by number."""
    folder = tmp_path_factory.mktemp("mutants")
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("MVLLM_", "FAULT_INJECTION"))}
    path = os.pathsep.join(folder for folder in sys.path if folder)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            mutant_runs.__name__,
            str(folder),
            *map(str, sorted(chosen or (-1,))),
        ],
        env={**ours, "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


NOT_CLAIMED = {"GRF-03", "OPS-05", "SHP-03"}
"""The device has no compiler and no rotary embedding, and counts no compilations; three mutants do."""


@pytest.mark.parametrize("number", range(len(UNCHANGED)), ids=[mutant.name for mutant, _ in UNCHANGED])
def test_the_device_as_it_is_passes_every_clause_that_a_mutant_fails(
    examined: Path, chosen: set[int] | None, number: int
) -> None:
    clauses = unchanged(chosen)[number][1]
    if not clauses:
        pytest.skip("no mutant is examined under these variables")
    found = statuses(examined / str(number))
    expected = {name: "not claimed" if name in NOT_CLAIMED else "passed" for name in clauses}
    assert {name: found.get(name) for name in clauses} == expected


@pytest.mark.parametrize("number", list(places()))
def test_the_first_clause_that_fails_names_the_fault(examined: Path, number: int) -> None:
    mutant, said = MUTANTS[number], statuses(examined / str(len(UNCHANGED) + number))
    found = [name for name, status in said.items() if status == "failed"]
    assert found[:1] == [mutant.clause], f"failed, in order: {found}"

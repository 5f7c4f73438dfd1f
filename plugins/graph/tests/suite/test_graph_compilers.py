"""The clauses about models as graphs, on a test platform that satisfies them and violates them on request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from plugins.graph.tests.interpreter_platform import FAULT, graph_platform_path

from mvllm_conformance.plugin_command import write_plugin
from tests.helpers.plugins import write_metadata

CLAUSES = ("GRA-01", "GRA-02", "GRA-03", "GRA-04", "GRA-05", "GRA-06", "GRA-07")


def run_suite(
    folder: Path, fault: str | None, only: str, plugin: list[str] | None = None, name: str = "graph-interpreter"
) -> dict[str, str]:
    """The suite's status of each of `only`, clauses or families separated by commas.

    Args:
        plugin: Search path of another platform, `name`, without faults.
    """
    path = os.pathsep.join([*(plugin or graph_platform_path(folder)), *(entry for entry in sys.path if entry)])
    report = folder / "report.json"
    command = [*["-m", "mvllm.entrypoints.cli.main", "conformance", "--quick", "--platform", name]]
    done = subprocess.run(
        [sys.executable, *command, "--only", only, "--report", str(report)],
        env={**os.environ, "PYTHONPATH": path, **({} if fault is None else {FAULT: fault})},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert report.exists(), (done.stdout + done.stderr)[-3000:]
    found = json.loads(report.read_text(encoding="utf-8"))["clauses"]
    wanted = only.split(",")
    return {name: clause["status"] for name, clause in found.items() if name in wanted or name[:3] in wanted}


@pytest.mark.exhaustive
@pytest.mark.timeout(1000)
def test_an_interpreter_keeps_every_clause_that_it_claims(tmp_path: Path) -> None:
    found = run_suite(tmp_path, None, "ATT,KVL,OPS,STA,GRA")
    assert set(found.values()) <= {"passed", "not claimed"}
    assert {found[name] for name in CLAUSES} == {"passed"}


@pytest.mark.exhaustive
@pytest.mark.timeout(1000)
def test_a_platform_that_stores_by_block_table_may_not_change_earlier_slots_of_a_block(tmp_path: Path) -> None:
    assert run_suite(tmp_path, "KVL-03", "KVL-03") == {"KVL-03": "failed"}


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[pytest.mark.exhaustive] * (name != "GRA-05")) for name in CLAUSES]
)
def test_the_clause_that_a_program_violates_fails(tmp_path: Path, fault: str) -> None:
    assert run_suite(tmp_path, fault, fault) == {fault: "failed"}


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    "only",
    [
        "PLG-03,KVL-05,ATT-01,GRA-02,GRA-05",
        pytest.param("PLG,PRB,CFG,DEV,MEM,KVL,ATT,OPS,GRA,RUN,SMP,SHP,COM,E2E,LIF", marks=pytest.mark.exhaustive),
    ],
)
def test_a_new_plugin_with_a_graph_compiler_keeps_every_clause_that_it_claims(tmp_path: Path, only: str) -> None:
    write_plugin("acme", tmp_path / "new", graph=True)
    write_metadata(tmp_path / "installed", "mvllm-acme", "[mvllm.platforms]\nacme = mvllm_acme.plugin\n")
    plugin = [str(tmp_path / "installed"), str(tmp_path / "new" / "src")]
    found = run_suite(tmp_path, None, only, plugin, "acme")
    assert set(found.values()) <= ({"passed"} if "-" in only else {"passed", "not claimed", "not run"})

"""`mvllm conformance`: the suite for those who need not know pytest."""

from __future__ import annotations

import importlib.util
import json

from mvllm.entrypoints.cli.main import main
from mvllm.testing.clauses import CLAUSES


def test_it_lists_the_clauses(capsys):
    assert main(["conformance", "--clauses"]) == 0
    printed = capsys.readouterr().out
    assert all(f"{clause.id}  since" in printed and clause.sentence in printed for clause in CLAUSES.values())


def test_it_examines_a_platform_writes_a_report_and_shows_it(tmp_path, capfd):
    report = tmp_path / "report.json"
    assert main(["conformance", "--platform", "cpu", "--only", "SMP-01", "--report", str(report), "--", "-x"]) == 0
    assert "SMP-01  passed" in capfd.readouterr().out
    assert json.loads(report.read_text())["clauses"]["SMP-01"]["status"] == "passed"
    assert main(["conformance", "--show", str(report)]) == 0
    assert "| SMP-01 | The greedy token" in capfd.readouterr().out


def test_what_is_missing_is_said_with_the_command_that_installs_it(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "pytest" else find(name, *rest)
    )
    assert main(["conformance", "--platform", "cpu"]) == 1
    assert "pip install 'mvllm[testing]'" in capsys.readouterr().err


def test_a_report_that_cannot_be_read_is_an_error(tmp_path, capsys):
    assert main(["conformance", "--show", str(tmp_path / "none.json")]) == 1
    assert "is no conformance report" in capsys.readouterr().err

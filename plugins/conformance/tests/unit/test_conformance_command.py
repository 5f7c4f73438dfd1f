"""`mvllm conformance`: clauses, runs, reports and errors."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

from mvllm.entrypoints.cli.main import main
from mvllm_conformance.clauses import CLAUSES


def test_it_lists_the_clauses(capsys):
    assert main(["conformance", "--clauses"]) == 0
    printed = capsys.readouterr().out
    assert all(f"{clause.id}  since" in printed and clause.sentence in printed for clause in CLAUSES.values())


def test_it_tests_a_platform_and_writes_and_prints_a_report(tmp_path, capfd):
    report = tmp_path / "report.json"
    assert (
        main(["conformance", "--platform", "cpu", "--only", "SMP-01,MEM-05", "--report", str(report), "--", "-x"]) == 0
    )
    printed = capfd.readouterr().out
    assert "SMP-01  passed" in printed and "MEM-05  not claimed" in printed
    assert "SKIPPED" not in printed, "the table ends the output"
    assert json.loads(report.read_text())["clauses"]["SMP-01"]["status"] == "passed"
    assert main(["conformance", "--show", str(report)]) == 0
    assert "| SMP-01 | The greedy token" in capfd.readouterr().out


def test_files_of_the_current_folder_are_ignored(tmp_path):
    (tmp_path / "tests").mkdir()
    for folder in (tmp_path, tmp_path / "tests"):
        (folder / "conftest.py").write_text("raise SystemExit('somebody else's')\n")
    command = [sys.executable, "-c", "import sys; from mvllm.entrypoints.cli.main import main; sys.exit(main())"]
    done = subprocess.run(
        [*command, "conformance", "--platform", "cpu", "--only", "PLG-02"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and "PLG-02  passed" in done.stdout, done.stdout + done.stderr


def test_missing_packages_are_reported_with_the_install_command(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "pytest" else find(name, *rest)
    )
    assert main(["conformance", "--platform", "cpu"]) == 1
    assert "needs pytest. Run: " in (err := capsys.readouterr().err) and "pip install pytest" in err


def test_a_report_that_cannot_be_read_is_an_error(tmp_path, capsys):
    assert main(["conformance", "--show", str(tmp_path / "none.json")]) == 1
    assert "is not a conformance report" in capsys.readouterr().err

"""The table of models lists what the tests cover, and nothing that no test covers any more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers import model_coverage
from tests.unit.docs import models_page
from tests.unit.docs.models_page import PAGE, ROOT, merged_record, read_record, table, with_table

pytestmark = pytest.mark.fresh_programs

COMMAND = "run: python -m tests.unit.docs.models_page"


def collected_from(files: set[str], folder: Path) -> model_coverage.Coverage:
    """The claims of all tests in `files`."""
    path = folder / "notes.json"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *sorted(files)],
        env={**os.environ, model_coverage.VARIABLE: str(path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return model_coverage.from_json(json.loads(path.read_text(encoding="utf-8"))["collected"])


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page, read_record()) == page, COMMAND


@pytest.mark.timeout(1300)
def test_every_entry_has_a_test_that_covers_it(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    notes = request.config.pluginmanager.get_plugin("mvllm-shown")
    assert isinstance(notes, model_coverage.CoverageRecorder)
    record, claimed = read_record(), dict(notes.collected)
    missing = {test for claim, tests in record.items() for test in tests - claimed.get(claim, set())}
    if missing:  # entries of files outside this run, or of deleted tests
        files = {test.partition("::")[0] for test in missing}
        gone = {file for file in files if not (ROOT / file).exists()}
        assert not gone, f"{COMMAND}, without {gone} in {models_page.RECORD.name}"
        claimed = collected_from(files, tmp_path)
        for claim, tests in notes.collected.items():
            claimed.setdefault(claim, set()).update(tests)
    wrong = {claim: sorted(tests - claimed.get(claim, set())) for claim, tests in record.items()}
    assert not {claim: tests for claim, tests in wrong.items() if tests}


# --- the functions that collect claims


def item_with(*marks: Any, cls: type | None = None, **params: Any) -> Any:
    """The parts of a test that `coverage_of` reads."""
    return SimpleNamespace(
        nodeid="tests/test_it.py::test_it[0]",
        iter_markers=lambda name: [mark.mark for mark in marks],
        callspec=SimpleNamespace(params=params),
        cls=cls,
    )


SHOWS = pytest.mark.shows


@pytest.mark.parametrize(
    ("mark", "params", "claims"),
    [
        (SHOWS("tokens"), {"checkpoint": "qwen2-mqa-tied"}, [("qwen2", "native", "tokens", "")]),
        (SHOWS("tokens", impl="transformers"), {"name": "new-one"}, [("new", "transformers", "tokens", "")]),
        (SHOWS("lora", family="llama"), {}, [("llama", "native", "lora", "")]),
        (SHOWS("layout"), {"name": "gpt2", "tensor": 2, "pipeline": 1}, [("gpt2", "native", "tp", "")]),
        (
            SHOWS("layout"),
            {"name": "gpt2", "tensor": 2, "pipeline": 2},
            [("gpt2", "native", "tp", ""), ("gpt2", "native", "pp", "")],
        ),
        (SHOWS("layout"), {"name": "gpt2", "tensor": 1, "pipeline": 1}, []),
        (
            SHOWS("quantization", by="scheme"),
            {"name": "opt", "scheme": "gptq-desc-act"},
            [("opt", "native", "quantization", "gptq")],
        ),
    ],
)
def test_claims_follow_from_marks_and_parameters(mark: Any, params: dict[str, Any], claims: list) -> None:
    assert list(model_coverage.coverage_of(item_with(mark, **params))) == claims


def test_a_class_may_give_defaults_for_the_marks() -> None:
    cls = type("TestIt", (), {"shown_impl": "transformers", "shown_family": "bert"})
    assert list(model_coverage.coverage_of(item_with(SHOWS("tokens"), cls=cls))) == [
        ("bert", "transformers", "tokens", "")
    ]


@pytest.mark.parametrize(
    "mark", [SHOWS("tokens"), SHOWS("speed", family="llama"), SHOWS(family="llama"), SHOWS("tp", x=1)]
)
def test_an_empty_mark_is_refused(mark: Any) -> None:
    with pytest.raises(pytest.UsageError, match="mark `shows`"):
        list(model_coverage.coverage_of(item_with(mark)))


def test_a_run_adds_passed_claims_and_drops_claims_that_its_files_no_longer_make() -> None:
    tokens, sharded = ("llama", "native", "tokens", ""), ("llama", "native", "tp", "")
    record = {tokens: {"a.py::test_a", "b.py::test_b"}, sharded: {"a.py::test_old"}}
    collected = {tokens: {"a.py::test_a", "a.py::test_new"}}
    found = merged_record(record, collected, {tokens: {"a.py::test_new"}})
    assert found == {tokens: {"a.py::test_a", "a.py::test_new", "b.py::test_b"}}


def test_a_failing_test_covers_nothing(pytester_run: Any) -> None:
    notes = pytester_run("assert name != 'gpt2'")
    assert [row[0] for row in notes["collected"]] == ["gpt2", "opt"]
    assert [row[0] for row in notes["passed"]] == ["opt"]


@pytest.fixture
def pytester_run(tmp_path: Path) -> Any:
    """Runs a marked test over two checkpoints and returns the results file."""

    def run(body: str) -> dict[str, list[list[Any]]]:
        (tmp_path / "conftest.py").write_text(
            "from tests.helpers import model_coverage\n\n"
            "def pytest_configure(config):\n"
            "    config.addinivalue_line('markers', 'shows: .')\n"
            "    config.pluginmanager.register(model_coverage.CoverageRecorder(), 'mvllm-shown')\n"
            "    model_coverage.family_of = str\n"  # without the zoo, and therefore without torch
        )
        (tmp_path / "test_it.py").write_text(
            "import pytest\n\n"
            "@pytest.mark.shows('tokens')\n"
            "@pytest.mark.parametrize('name', ['gpt2', 'opt'])\n"
            f"def test_it(name):\n    {body}\n"
        )
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)],
            env={**os.environ, model_coverage.VARIABLE: str(tmp_path / "notes.json"), "PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            capture_output=True,
            timeout=120,
        )
        return json.loads((tmp_path / "notes.json").read_text(encoding="utf-8"))

    return run


def test_a_row_lists_quantization_methods_and_uncovered_features() -> None:
    record = {("opt", "native", "quantization", "gptq"): {"t"}, ("opt", "native", "tokens", ""): {"t"}}
    assert table(record).splitlines()[-1] == "| `opt` | native | yes | – | – | GPTQ | – |"

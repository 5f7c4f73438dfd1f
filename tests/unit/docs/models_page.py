"""The table of docs/reference/models.md: features of each model family that passing tests cover.

python -m tests.unit.docs.models_page RUN.json ...      merges the results of runs into the record, writes the page
python -m tests.unit.docs.models_page                   writes the page from the record

`ci/dev.py test` writes its results to build/shown/. The record keeps the tests that a run did not collect, and drops
marks and tests that no longer exist.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

from tests.helpers.model_coverage import IMPLS, Coverage, as_json, from_json

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "models.md"
RECORD = Path(__file__).with_name("models_shown.json")
BEGIN, END = "<!-- table: models -->\n", "\n<!-- end of table -->"
COLUMNS = {"tokens": "tokens", "tp": "TP", "pp": "PP", "quantization": "quantization", "lora": "LoRA"}
HOWS = {
    "awq": "AWQ",
    "gptq": "GPTQ",
    "w4a16": "W4A16",
    "w8a16": "W8A16",
    "w8a8": "W8A8",
    "fp8": "FP8",
    "mxfp4": "MXFP4",
}
"""Quantization methods with the names that users know; others have the names of the tests."""


def read_record() -> Coverage:
    return from_json(json.loads(RECORD.read_text(encoding="utf-8")))


def merged_record(record: Coverage, collected: Coverage, passed: Coverage) -> Coverage:
    """The record after a run: passed tests are added, and claims that a collected file no longer makes are dropped."""
    files = {test.partition("::")[0] for tests in collected.values() for test in tests}
    kept = {
        claim: {test for test in tests if test.partition("::")[0] not in files or test in collected.get(claim, ())}
        for claim, tests in record.items()
    }
    for claim, tests in passed.items():
        kept.setdefault(claim, set()).update(tests)
    return {claim: tests for claim, tests in kept.items() if tests}


def table(record: Coverage) -> str:
    """One row for each family and implementation."""
    rows = sorted({(family, IMPLS.index(impl)) for family, impl, _, _ in record})
    lines = [f"| `model_type` | implementation | {' | '.join(COLUMNS.values())} |", "|---" * (2 + len(COLUMNS)) + "|"]
    for family, impl in rows:
        cells = []
        for feature in COLUMNS:
            hows = sorted(how for f, i, what, how in record if (f, i, what) == (family, IMPLS[impl], feature))
            cells.append(", ".join(HOWS.get(how, how) for how in hows if how) or ("yes" if hows else "–"))
        lines.append(f"| `{family}` | {IMPLS[impl]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def sources(record: Coverage) -> str:
    """The tests of each column."""
    lines = []
    for feature, title in COLUMNS.items():
        tests = sorted({test for (_, _, what, _), tests in record.items() if what == feature for test in tests})
        files: dict[str, list[str]] = {}
        for test in tests:
            files.setdefault(test.partition("::")[0], []).append(test.rpartition("::")[2])
        if files:
            text = f"- **{title}**: {', '.join(f'`{file}`' for file in files)}"
            lines += textwrap.wrap(text, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def with_table(page: str, record: Coverage) -> str:
    """The page with a new table."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"{PAGE.name} has no place for the table"
    return f"{before}{BEGIN}{table(record)}\n\nShown by:\n\n{sources(record)}{end}{after}"


def main(runs: Iterable[Path]) -> None:
    record = read_record() if RECORD.exists() else {}
    for run in runs:
        notes = json.loads(run.read_text(encoding="utf-8"))
        record = merged_record(record, from_json(notes["collected"]), from_json(notes["passed"]))
    rows = ",\n".join(f" {json.dumps(row)}" for row in as_json(record))
    RECORD.write_text(f"[\n{rows}\n]\n", encoding="utf-8")
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")


if __name__ == "__main__":
    main(map(Path, sys.argv[1:]))

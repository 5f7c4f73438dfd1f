"""docs/explanation/performance.md: charts and tables show the data file; figures have commands of the repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ci import performance_charts
from tests.unit.docs.hardware import ROOT

FOLDER = ROOT / "docs" / "explanation"
PAGES = [FOLDER / "performance.md", FOLDER / "performance-details.md"]


def test_charts_and_tables_are_up_to_date() -> None:
    for path, text in performance_charts.files().items():
        assert path.read_text("utf-8") == text, "run: python3 ci/performance_charts.py"


def test_it_begins_with_two_charts_and_a_table() -> None:
    before, _, _ = PAGES[0].read_text("utf-8").partition("\n## ")
    assert re.findall(r"^(?:!\[|<!-- table)", before, re.MULTILINE) == ["![", "![", "<!-- table"]
    assert len(PAGES[0].read_text("utf-8").splitlines()) <= 400


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_figures_have_commands_that_exist(page: Path) -> None:
    text = " ".join(page.read_text("utf-8").split())
    assert not re.search(r"\btargets?\b|\bmissed\b|not in the repository", text)
    for name in set(re.findall(r"python3? -m ([\w.]+)", text)):
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), name
    for name in set(re.findall(r"python3? ([\w/]+\.py)", text)):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_section_with_a_table_says_how_to_repeat_it(page: Path) -> None:
    sections = re.split(r"^## ", page.read_text("utf-8"), flags=re.MULTILINE)
    with_tables = [each for each in sections if re.search(r"^\| ?-", each, re.MULTILINE)]
    assert len(with_tables) > 3
    assert [each.partition("\n")[0] for each in with_tables if not re.search(r"`python3? ", each)] == []


def test_charts_are_readable_on_dark_and_light_pages() -> None:
    for chart in performance_charts.charts(performance_charts.read()).values():
        assert "prefers-color-scheme: dark" in chart and 'class="back"' in chart
        assert not re.search(r'<text(?![^>]*class="(?:text|quiet)")', chart)

"""A pytest plugin that keeps files from being imported of which no test would run: `-p ci.selection --select WHAT`.

    serial    files whose text has the mark `serial`
    quick     for the inner loop: unit tests without torch, and the tests that are marked `quick`

Which file is of which kind is read from its text: importing them all takes longer than these tests.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

HEAVY = re.compile(
    r"^\s*(from|import) (torch|transformers|multiprocessing|tests\.helpers\.(model_zoo|parity|paged_driver))\b"
    r"|\bsubprocess\.|\bimport_module\(|^pytestmark = .*slow",
    re.MULTILINE,
)
"""What the text of a test has that takes its time: torch, transformers, or programs that it starts."""
SERIAL = re.compile(r"\bmark\.serial\b")
QUICK = re.compile(r"\bmark\.quick\b")
UNIT = ("tests", "unit")


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def is_light(path: Path) -> bool:
    """Whether it is a file of unit tests that takes neither torch nor a process."""
    folders = path.parts
    is_unit = any(folders[i : i + 2] == UNIT for i in range(len(folders)))
    return is_unit and not HEAVY.search(text_of(path))


def is_wanted(path: Path, what: str) -> bool:
    if what == "serial":
        return bool(SERIAL.search(text_of(path)))
    return is_light(path) or bool(QUICK.search(text_of(path)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--select", choices=("serial", "quick"), help="import only files that have such tests")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Whether a file is passed over; None lets others decide."""
    what = config.getoption("--select")
    if what is None or not collection_path.is_file() or is_wanted(collection_path, what):
        return None
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a file that is not light, `quick` takes the tests that say so; the mark `serial` is for `-m`."""
    if config.getoption("--select") != "quick":
        return
    kept = [item for item in items if item.get_closest_marker("quick") or is_light(item.path)]
    left_out = set(items).difference(kept)
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = kept

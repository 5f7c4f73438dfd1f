"""A pytest plugin that imports only files with selected tests: `-p ci.selection --select WHAT`.

    serial    files that contain the mark `serial`
    quick     for the inner loop: unit tests without torch, and tests with the mark `quick`

Files are classified by their text, since importing all files takes longer than these tests.
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
"""Text of slow test files: imports of torch or transformers, or subprocesses."""
SERIAL = re.compile(r"\bmark\.serial\b")
QUICK = re.compile(r"\bmark\.quick\b")
UNIT = ("tests", "unit")


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def is_light(path: Path) -> bool:
    """Whether a file has unit tests without torch and subprocesses."""
    folders = path.parts
    is_unit = any(folders[i : i + 2] == UNIT for i in range(len(folders)))
    return is_unit and not HEAVY.search(text_of(path))


def is_selected(path: Path, what: str) -> bool:
    if what == "serial":
        return bool(SERIAL.search(text_of(path)))
    return is_light(path) or bool(QUICK.search(text_of(path)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--select", choices=("serial", "quick"), help="import only files with these tests")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Returns True to ignore a file, None otherwise."""
    what = config.getoption("--select")
    if what is None or not collection_path.is_file() or is_selected(collection_path, what):
        return None
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """For `quick`, keeps all tests of light files, and tests with the mark `quick` of other files."""
    if config.getoption("--select") != "quick":
        return
    kept = [item for item in items if item.get_closest_marker("quick") or is_light(item.path)]
    deselected = set(items).difference(kept)
    if deselected:
        config.hook.pytest_deselected(items=list(deselected))
        items[:] = kept

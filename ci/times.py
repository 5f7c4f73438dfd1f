"""A pytest plugin that prints the time of each test file: `-p ci.times`, in the root of the repository.

It starts slow files first, so that no worker runs a slow file alone at the end.

For each file it prints the elapsed seconds and the CPU seconds of the tests and of child processes that they waited
for. On few cores the CPU time decides the length of a run. Child processes without a wait are not counted.
`--times FILE` writes the times of all tests as JSON.
"""

from __future__ import annotations

import json
import resource
import time
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

SHOWN = 30
"""Files in the table."""

FIRST = (
    "tests/engine/",
    "tests/conformance/",
    "plugins/conformance/tests/suite/",
    "plugins/graph/tests/suite/",
    "tests/packaging/",
    "tests/e2e/",
)
"""Folders whose tests start many processes. Their files run after those with the mark `slow`, before all others."""

Spent = dict[str, tuple[float, float]]
"""Test id -> elapsed seconds, CPU seconds."""


def cpu_seconds() -> float:
    """CPU seconds of this process and of its finished descendants."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@dataclass
class Times:
    """The times of all tests, in this process or in the workers of xdist.

    Attributes:
        spent: Times by test.
        busy: Worker -> seconds from its first test to the end of its last.
    """

    spent: Spent = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)
    begun: float | None = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        started, before = time.monotonic(), cpu_seconds()
        self.begun = started if self.begun is None else self.begun
        try:
            return (yield)
        finally:
            ended = time.monotonic()
            self.spent[item.nodeid] = (ended - started, cpu_seconds() - before)
            self.busy = {"": ended - self.begun}

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["times"] = {"spent": self.spent, "busy": self.busy.get("", 0.0)}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        times = (getattr(node, "workeroutput", None) or {}).get("times")
        if times is not None:
            self.spent.update({name: tuple(pair) for name, pair in times["spent"].items()})
            self.busy[node.gateway.id] = times["busy"]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        files = by_file(self.spent)
        if not files or hasattr(terminalreporter.config, "workeroutput"):
            return
        total = sum(cpu for _, _, cpu in files.values())
        terminalreporter.section(f"where the time went: {total:.0f} seconds of CPU")
        for name, seconds in sorted(self.busy.items()):
            terminalreporter.write_line(f"{name or 'all'}: busy for {seconds:.0f} s")
        terminalreporter.write_line(f"{'CPU s':>8} {'seconds':>8} {'tests':>6}  file")
        for name, (tests, seconds, cpu) in sorted(files.items(), key=lambda pair: -pair[1][2])[:SHOWN]:
            terminalreporter.write_line(f"{cpu:8.1f} {seconds:8.1f} {tests:6d}  {name}")
        if path := terminalreporter.config.getoption("--times"):
            Path(path).write_text(json.dumps({"busy": self.busy, "spent": self.spent}, indent=1), encoding="utf-8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts the files; keeps the order of tests in a file."""
    count = Counter(item.nodeid.split("::")[0] for item in items)
    slow = {item.nodeid.split("::")[0] for item in items if item.get_closest_marker("slow")}

    def sort_key(item: pytest.Item) -> tuple[int, int, str]:
        file = item.nodeid.split("::")[0]
        kind = next((i for i, beginning in enumerate(FIRST) if file.startswith(beginning)), len(FIRST))
        kind = -1 if file in slow else kind
        return kind, -count[file], file

    items.sort(key=sort_key)


def by_file(spent: Spent) -> dict[str, tuple[int, float, float]]:
    """File -> number of tests, elapsed seconds, CPU seconds."""
    files: dict[str, tuple[int, float, float]] = {}
    for name, (seconds, cpu) in spent.items():
        count, seconds_before, cpu_before = files.get(name.split("::")[0], (0, 0.0, 0.0))
        files[name.split("::")[0]] = (count + 1, seconds_before + seconds, cpu_before + cpu)
    return files


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", metavar="FILE", help="write the seconds of each test as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Times(), "mvllm-times")

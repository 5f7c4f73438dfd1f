"""Marks for the model family and feature that a test covers, and records of the marked tests that passed.

    @pytest.mark.shows("tokens")                     family from the parameter `checkpoint` or `name`
    @pytest.mark.shows("layout")                     tp or pp: every size parameter above 1
    @pytest.mark.shows("quantization", by="scheme")  how: the first part of the parameter `scheme`
    @pytest.mark.shows("lora", family="llama")       for a test without such a parameter
    @pytest.mark.shows("tokens", impl="transformers")

A test that covers a feature only with some parameters has the mark on those (`pytest.param(..., marks=...)`). A class
can give defaults for the marks of its tests as its attributes `shown_family` and `shown_impl`. The environment variable
TESTS_SHOWN_FILE names the output file; `tests.unit.docs.models_page` writes docs/reference/models.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "TESTS_SHOWN_FILE"
FEATURES = ("tokens", "tp", "pp", "quantization", "lora")
IMPLS = ("native", "transformers")
_SIZES = {"tp": ("tensor", "tp", "tp_size"), "pp": ("pipeline", "pp", "pp_size")}
_NAMES = ("checkpoint", "name")

Claim = tuple[str, str, str, str]
"""Family, implementation, feature, how."""
Coverage = dict[Claim, set[str]]
"""Claims with their tests, without the tests' parameters."""


def coverage_of(item: pytest.Item) -> Iterator[Claim]:
    """The claims that `item` supports if it passes.

    Raises:
        pytest.UsageError: A mark has an unknown value, or names no family.
    """
    for mark in item.iter_markers("shows"):
        params: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
        known = {"family", "impl", "by", "how"}
        if unknown := {*mark.kwargs} - known or {*mark.args} - {*FEATURES, "layout"} or not mark.args:
            raise pytest.UsageError(f"{item.nodeid}: mark `shows` with {unknown or 'no feature'}")
        cls = getattr(item, "cls", None)
        impl = mark.kwargs.get("impl") or getattr(cls, "shown_impl", "native")
        name = next((params[key] for key in _NAMES if key in params), None)
        family = mark.kwargs.get("family") or getattr(cls, "shown_family", None) or (name and family_of(name))
        if impl not in IMPLS or not family:
            raise pytest.UsageError(f"{item.nodeid}: mark `shows` with family {family!r} and impl {impl!r}")
        how = mark.kwargs.get("how") or str(params.get(mark.kwargs.get("by"), "")).split("-")[0]
        for feature in mark.args:
            several = [size for size, keys in _SIZES.items() if any(params.get(key, 1) > 1 for key in keys)]
            for each in several if feature == "layout" else [feature]:
                yield family, impl, each, how


def family_of(name: str) -> str:
    """`model_type` of a zoo's checkpoint; names of other zoos begin with it."""
    from tests.helpers.model_zoo import ZOO

    return ZOO[name].config().model_type if name in ZOO else name.split("-")[0]


def function_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


class CoverageRecorder:
    """The pytest plugin, in this process or in the workers of xdist.

    Attributes:
        collected: Claims of all collected tests, before deselection.
        passed: Claims of the tests that passed.
    """

    def __init__(self) -> None:
        self.collected: Coverage = {}
        self.passed: Coverage = {}
        self._claims: dict[str, list[Claim]] = {}
        self._functions: dict[str, str] = {}

    @pytest.hookimpl(tryfirst=True)  # before `-m` and `-k` deselect tests
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if claims := list(coverage_of(item)):
                self._claims[item.nodeid], self._functions[item.nodeid] = claims, function_of(item)
                for claim in claims:
                    self.collected.setdefault(claim, set()).add(function_of(item))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            for claim in self._claims.get(report.nodeid, ()):
                self.passed.setdefault(claim, set()).add(self._functions[report.nodeid])

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["shown"] = {"collected": as_json(self.collected), "passed": as_json(self.passed)}
        elif path := os.environ.get(VARIABLE):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            notes = {"collected": as_json(self.collected), "passed": as_json(self.passed)}
            Path(path).write_text(json.dumps(notes, indent=1) + "\n", encoding="utf-8")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        shown = (getattr(node, "workeroutput", None) or {}).get("shown") or {}
        for kind, mine in (("collected", self.collected), ("passed", self.passed)):
            for claim, tests in from_json(shown.get(kind, [])).items():
                mine.setdefault(claim, set()).update(tests)


def as_json(shown: Coverage) -> list[list[Any]]:
    return [[*claim, sorted(tests)] for claim, tests in sorted(shown.items())]


def from_json(rows: list[list[Any]]) -> Coverage:
    return {(family, impl, feature, how): set(tests) for family, impl, feature, how, tests in rows}

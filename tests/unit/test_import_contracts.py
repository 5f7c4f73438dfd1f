"""The contract type that finds files that import each other in a circle."""

from __future__ import annotations

import itertools

import pytest

grimp = pytest.importorskip("grimp", reason="import-linter is not installed")

from ci.import_contracts import NoCircles  # noqa: E402


def check(*imports: tuple[str, str], ignore: tuple[str, ...] = ()) -> list[str]:
    """The circle that is found, as the files of the chain."""
    graph = grimp.ImportGraph()
    for importer, imported in imports:
        graph.add_import(importer=importer, imported=imported)
    options = {"packages": ["a"], "ignore_imports": list(ignore)}
    found = NoCircles("circles", session_options={}, contract_options=options).check(graph, verbose=False)
    assert found.kept is not bool(found.metadata["circle"])
    return found.metadata["circle"]


def test_packages_may_import_from_each_other() -> None:
    assert check(("a.x.one", "a.y.two"), ("a.y.three", "a.x.four")) == []


def test_a_circle_is_shown_in_the_order_of_its_imports() -> None:
    circle = check(("a.x", "a.y"), ("a.y", "a.z"), ("a.z", "a.x"), ("a.z", "a.w"))
    assert circle[0] == circle[-1] and len(circle) == 4
    assert set(itertools.pairwise(circle)) == {("a.x", "a.y"), ("a.y", "a.z"), ("a.z", "a.x")}


def test_circles_of_other_packages_and_ignored_imports_are_allowed() -> None:
    assert check(("b.x", "b.y"), ("b.y", "b.x")) == []
    assert check(("a.x", "a.y"), ("a.y", "a.x"), ignore=("a.y -> a.x",)) == []

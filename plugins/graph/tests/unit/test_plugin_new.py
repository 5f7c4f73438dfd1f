"""`mvllm plugin new --graph`: a package whose platform has a graph compiler."""

from __future__ import annotations

import sys
import tomllib

from packaging.requirements import Requirement

from mvllm.entrypoints.cli.main import main
from mvllm_graph.operations import GRAPH_OPERATIONS


def test_the_option_for_graphs_writes_a_compiler(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plugin", "new", "acme", "--graph"]) == 0
    project = tomllib.loads((tmp_path / "mvllm-acme" / "pyproject.toml").read_text("utf-8"))["project"]
    assert [Requirement(text).name for text in project["dependencies"]] == ["mvllm", "mvllm-graph", "torch"]
    monkeypatch.syspath_prepend(tmp_path / "mvllm-acme" / "src")
    monkeypatch.delitem(sys.modules, "mvllm_acme", raising=False)
    from mvllm_acme.compiler import AcmeCompiler  # type: ignore[import-not-found]

    known = AcmeCompiler().operations()
    needed = {op.name for op in GRAPH_OPERATIONS.values() if op.group in ("array", "attention")}
    assert needed <= set(known) <= set(GRAPH_OPERATIONS)

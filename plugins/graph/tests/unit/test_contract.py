"""The part of the platform contract that this package has: its names, the operations of graphs, and GraphPlatform.

As in plugins/conformance/tests/unit/test_contract_surface.py, `contracts/current.json` is what the source has, and
`contracts/released-MAJOR.MINOR.json` what a release had; contract 1.0 had no graphs.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import re
from pathlib import Path

import pytest
from plugins.conformance.tests.unit.test_contract_pages import own_methods
from plugins.conformance.tests.unit.test_contract_surface import (
    assert_matches_introspection,
    load_contract,
    newest_release,
    unrecorded_changes_message,
    wrong_version_message,
)

import mvllm.plugin_api.graph
import mvllm_graph
from mvllm import plugin_api
from mvllm.entrypoints.cli.main import main
from mvllm_conformance.contract_changes import changes
from mvllm_conformance.contract_surface import GraphContractOperation, Member, as_data, read_surface
from mvllm_graph.operations import GRAPH_OPERATIONS

FOLDER = Path(__file__).parent / "contracts"
CURRENT = FOLDER / "current.json"
WHOLE = read_surface()
SURFACE = dataclasses.replace(
    WHOLE,
    hooks={},
    operations={},
    names={name: entry for name, entry in WHOLE.names.items() if name not in plugin_api.__all__},
)


def test_the_recorded_contract_is_current():
    message = unrecorded_changes_message(load_contract(CURRENT), SURFACE)
    assert not message, message.rpartition("run: ")[0] + "run: python -m plugins.graph.tests.unit.test_contract"


def test_the_version_matches_the_changes_since_the_last_release():
    message = wrong_version_message(newest_release(FOLDER), SURFACE)
    assert not message, message


def test_the_published_module_has_the_names_of_this_package():
    assert set(SURFACE.names) == set(mvllm_graph.__all__) - set(plugin_api.__all__)
    assert set(mvllm_graph.__all__) <= set(dir(mvllm_graph)) & set(dir(mvllm.plugin_api.graph))
    for name in mvllm_graph.__all__:
        assert getattr(mvllm.plugin_api.graph, name) is getattr(mvllm_graph, name)
    for name, entry in SURFACE.names.items():
        assert_matches_introspection(name, entry, getattr(mvllm_graph, name))


@pytest.mark.parametrize("name", sorted(n for n in SURFACE.names if isinstance(getattr(mvllm_graph, n), type)))
def test_classes_have_phases_and_docstrings(name):
    cls = getattr(mvllm_graph, name)
    marked = [WHOLE.names[each.__name__] for each in cls.__mro__ if each.__name__ in WHOLE.names]
    methods = own_methods(cls)
    public = methods.keys() & marked[0].members.keys()
    assert any(entry.phase for entry in marked) or all(marked[0].members[method].phase for method in public)
    assert all(inspect.getdoc(method) for method in methods.values())


# ------------------------------------------------------------------------------------------------- what is a change


@pytest.fixture
def new():
    """A copy of the contract for a test to change."""
    return copy.deepcopy(SURFACE)


def diff(new):
    return [str(change) for change in changes(SURFACE, new)]


def test_an_operation_of_graphs_that_compilers_must_name_is_major(new):
    new.graph_operations["cumprod"] = GraphContractOperation("array", "refused", ["x: Tensor"], "Tensor")
    new.graph_operations["swish"] = GraphContractOperation("named", "traced")
    new.graph_operations["fused_swish"] = GraphContractOperation("optional", "unused")
    new.graph_operations["moe"].if_left_out = "refused"
    new.graph_operations["add"].parameters.append("scale: float")
    del new.graph_operations["arange"]
    assert [line.partition(" was (")[0] for line in diff(new)] == [
        "major: graph operation add: its signature",
        "major: graph operation arange was removed",
        "major: graph operation cumprod (array) was added: compilers that do not name it cannot run models whose "
        "graphs have it",
        "minor: graph operation fused_swish (optional) was added: it occurs only if a compiler names it",
        "major: graph operation moe: if left out, it was traced, is refused: compilers that do not name it cannot run "
        "models whose graphs have it",
        "minor: graph operation swish (named) was added: for compilers that do not name it, it is traced as array "
        "operations",
    ]


def test_a_capability_that_every_graph_platform_claims_is_major(new):
    new.graph_capabilities["kv_transfer"] = "True"
    new.names["GraphPlatform"].members["warm_up"] = Member("method", required=True)
    assert diff(new) == [
        "major: GraphPlatform.warm_up was added, and is required",
        "major: GraphPlatform.capabilities: kv_transfer was not claimed, is True",
    ]


def test_a_parameter_of_a_method_that_graph_platforms_implement_is_major(new):
    new.names["GraphPlatform"].members["graph_compiler"].parameters.append("device: int = 0")
    [change] = diff(new)
    assert change.startswith("major: GraphPlatform.graph_compiler: its parameters were ()")


def test_a_contract_file_without_graphs_has_only_additions(new):
    new.graph_operations, new.graph_capabilities = {}, {}
    [change] = changes(new, SURFACE)
    assert str(change) == "minor: the operations of graphs and GraphPlatform's capabilities were added"


def test_the_operations_of_graphs_match_those_that_run():
    assert set(SURFACE.graph_operations) == set(GRAPH_OPERATIONS)
    for name, operation in GRAPH_OPERATIONS.items():
        read = SURFACE.graph_operations[name]
        assert read.group == operation.group, name
        assert read.if_left_out == (
            operation.if_left_out or ("refused" if operation.group in ("attention", "array") else "unused")
        ), name
        if operation.group in ("attention", "array", "collective"):
            parameters = [p.partition(":")[0].lstrip("*") for p in read.parameters if p != "*"]
            assert parameters == [*operation.parameters], name


def test_the_capabilities_of_graph_platforms_match_those_that_run_and_are_documented():
    class Some(mvllm_graph.GraphPlatform):
        dtypes = ("float32",)
        spec = None
        graph_compiler = None

    claimed = Some().capabilities
    bare = plugin_api.Capabilities(dtypes=("float32",), kv_dtypes=("float32",))
    differing = {name for name in vars(claimed) if getattr(claimed, name) != getattr(bare, name)}
    assert set(SURFACE.graph_capabilities) == differing
    shown = set(re.findall(r"`(\w+)`", inspect.getdoc(mvllm_graph.GraphPlatform).partition("Attributes:")[0]))
    assert (differing - {"collectives"}) | claimed.collectives <= shown


def test_the_command_prints_the_operations_of_graphs(capsys):
    assert main(["contract"]) == 0
    out = capsys.readouterr().out
    assert all(f" {name}" in out for name in mvllm_graph.__all__)
    for line in (
        "graph operation linear  # named, traced if left out",
        "graph operation neg(x: Tensor) -> Tensor  # array, refused if left out",
        "graph capability sinks = True",
    ):
        assert line in out.splitlines()


if __name__ == "__main__":
    CURRENT.write_text(json.dumps(as_data(SURFACE), indent=1) + "\n", encoding="utf-8")

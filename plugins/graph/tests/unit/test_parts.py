"""Graphs of tensor-parallel ranks are cut at their collectives, and give the logits of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from plugins.graph.tests.graph_driver import GraphDriver, trace_checkpoint
from plugins.graph.tests.unit.test_families import CHUNKED, SPARSE, run_steps

from mvllm.distributed.group_coordinator import GroupCoordinator
from mvllm_graph import Interpreter, Node, StepGraph, Value
from mvllm_graph.parts import COLLECTIVES, cut_graph
from tests.helpers.model_zoo import ZOO, make_checkpoint
from tests.helpers.paged_driver import PagedDriver, load_model
from tests.helpers.thread_ranks import fake_group, run_ranks

IN_EVERY_RUN = ("llama-gqa",)
MEMBERS = [
    pytest.param(name, marks=[pytest.mark.exhaustive] * (name not in IN_EVERY_RUN))
    for name in sorted(ZOO.keys() - CHUNKED - SPARSE)
]


@pytest.mark.parametrize("name", MEMBERS)
def test_two_ranks_give_the_logits_of_one(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path / name, tokenizer=False)
    compiler = Interpreter()
    traced = [trace_checkpoint(folder, compiler, fake_group("tp", rank, 2)) for rank in range(2)]
    assert not any(node.op in COLLECTIVES for graph in traced[0].graphs for node in graph.nodes)

    def run(group: GroupCoordinator) -> list[torch.Tensor]:
        return run_steps(GraphDriver(traced[group.rank], compiler, group))

    with torch.inference_mode():
        expected = run_steps(PagedDriver(load_model(folder)))
    for found in run_ranks(2, run):
        for ours, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=0)


def value(name: str, kind: str = "result") -> Value:
    return Value(name, kind, ("T", 4), "float32")  # type: ignore[arg-type]


def node(op: str, made: str, *inputs: str) -> Node:
    return Node(op, inputs, (value(made),))


def whole() -> StepGraph:
    """v4 is read by a part after the next one; two collectives follow each other."""
    x, w = value("x", "step"), value("w", "weight")
    nodes = (
        node("add", "v0", "x", "w"),
        node("neg", "v4", "x"),
        node("all_reduce", "v1", "v0"),
        node("mul", "v2", "v1", "w"),
        node("all_reduce", "v3", "v2"),
        node("all_reduce", "v5", "v4"),
        node("add", "v6", "v3", "v5"),
        node("add", "v7", "v6", "v0"),
        node("all_gather", "v8", "v7"),
    )
    return StepGraph("model", (x, w), nodes, ("v8",))


def test_values_that_cross_a_cut_are_results_and_step_inputs() -> None:
    cut = cut_graph(whole())
    assert [graph.name for graph in cut.graphs] == ["model.0", "model.1", "model.2"]
    assert [graph.outputs for graph in cut.graphs] == [("v0", "v4"), ("v2",), ("v7",)]
    steps = [[value.name for value in graph.inputs_of("step")] for graph in cut.graphs]
    assert steps == [["x"], ["v1"], ["v0", "v3", "v5"]]
    assert [[each.outputs[0].name for each in part.collectives] for part in cut.parts] == [["v1"], ["v3", "v5"], ["v8"]]
    assert [graph.inputs_of("weight") != [] for graph in cut.graphs] == [True, True, False]
    assert cut.parts[0].needed == {"v0", "v1", "v4", "w"} and cut.parts[-1].needed == {"v8"}
    assert [each.name for each in cut.outputs] == ["v8"]


def test_a_graph_is_not_cut_at_collectives_of_the_compiler() -> None:
    graph = whole()
    assert cut_graph(graph, COLLECTIVES).graphs == (graph,)
    assert [len(part.nodes) for part in cut_graph(graph, ["all_reduce"]).graphs] == [8]

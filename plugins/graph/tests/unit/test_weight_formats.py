"""Each format of quantized weights is arrays and attributes of an operation in the graphs, also of packed experts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from plugins.graph.tests.graph_driver import GraphDriver, trace_checkpoint
from plugins.graph.tests.unit.test_families import run_steps

from mvllm.plugin_api import OpProvider
from mvllm_graph import Interpreter, StepGraph
from mvllm_graph.operations import GRAPH_OPERATIONS
from tests.helpers.float8_zoo import FLOAT8_SCHEMES as FLOAT8
from tests.helpers.float8_zoo import make_float8
from tests.helpers.paged_driver import PagedDriver, load_model, make_context
from tests.helpers.quantized_zoo import SCHEMES as INTEGERS
from tests.helpers.quantized_zoo import make_quantized

WITHOUT_PACKED_EXPERTS = ("gptq-desc-act", "w4a16-actorder", "awq-some-floats")
"""Columns with an order, or experts of several formats: experts become floats."""

OPTIONAL = [name for name, op in GRAPH_OPERATIONS.items() if op.group == "optional"]


def check(folder: Path, compiler: Interpreter, optional: Sequence[str] = ()) -> set[str]:
    """The operations of the graphs, whose logits are compared with the model's with the same optional operations."""
    references = {name: GRAPH_OPERATIONS[name].reference for name in optional}
    providers = [OpProvider(name, "definition", each) for name, each in references.items() if each is not None]
    traced = trace_checkpoint(folder, compiler)
    with torch.inference_mode():
        expected = run_steps(PagedDriver(load_model(folder, make_context(providers=providers))))
    for ours, wanted in zip(run_steps(GraphDriver(traced, compiler)), expected, strict=True):
        torch.testing.assert_close(ours, wanted, atol=2e-4, rtol=0)
    for graph in traced.graphs:
        assert StepGraph.from_bytes(graph.to_bytes()) == graph
    return {node.op for graph in traced.graphs for node in graph.nodes}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["llama-gqa", "qwen2moe"])
@pytest.mark.parametrize("scheme", [*INTEGERS, *FLOAT8])
def test_graphs_have_the_format_of_the_checkpoint(scheme: str, name: str, tmp_path: Path) -> None:
    make = make_quantized if scheme in INTEGERS else make_float8
    folder = make(scheme, tmp_path, name).quantized
    ops = check(folder, Interpreter())
    named = check(folder, Interpreter(optional=OPTIONAL), OPTIONAL)
    if scheme in INTEGERS:
        assert "quantized_linear" in ops and "quantized_moe" not in ops
        assert name != "qwen2moe" or scheme in WITHOUT_PACKED_EXPERTS or "quantized_moe" in named

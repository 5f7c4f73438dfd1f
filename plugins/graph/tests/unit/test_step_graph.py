"""StepGraphs as data, the list of their operations, and the errors of tracing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from plugins.graph.tests import graph_operations_page
from plugins.graph.tests.interpreter_platform import graph_platform_path
from torch import nn

from mvllm.entrypoints.cli.main import main
from mvllm.errors import PlatformError
from mvllm.ops.quantized_linear import QuantizedWeight
from mvllm.platform.attention import AttentionSpec
from mvllm.platform.state import StateTensor
from mvllm.platform.step_graph import CacheValue, Node, StateValue, StepGraph, StepSizes, Value, substitute
from mvllm_graph.operations import GRAPH_OPERATIONS
from mvllm_graph.trace import named_arrays
from tests.helpers.plugins import prepend

SPEC = AttentionSpec(4, 2, 16, "float32", "float32", 0.25, sliding_window=8)


def example() -> StepGraph:
    cache = CacheValue("cache.0", "cache", (), "float32", SPEC, 0)
    state = StateValue("state.0.1", "state", (), "float32", StateTensor((4, 8), "float32"), 0, 1)
    x, y = Value("x", "step", ("T", 64), "float32"), Value("v0", "result", ("T", 4, 16), "float32")
    nodes = (
        Node("reshape", ("x",), (y,), {"shape": ("T", 4, 16)}),
        Node("arange", (), (Value("v1", "result", ("2*T-1",), "int64"),), {"start": 0, "stop": "2*T-1", "step": 1}),
    )
    return StepGraph("model", (x, cache, state), nodes, ("v0",))


@pytest.mark.parametrize(
    ("dim", "size"), [(7, 7), ("T", 5), ("R+1", 4), ("8*T", 40), ("2*T-1", 9), ("P", "P"), ("silu", "silu")]
)
def test_sizes_are_numbers_and_expressions_of_one_symbol(dim: int | str, size: int | str) -> None:
    assert substitute(dim, {"T": 5, "R": 3}) == size


def test_a_graph_with_sizes_has_numbers() -> None:
    graph = example().with_sizes(T=3)
    assert graph.inputs[0].shape == (3, 64)
    assert graph.nodes[0].attributes == {"shape": (3, 4, 16)} and graph.nodes[0].outputs[0].shape == (3, 4, 16)
    assert graph.nodes[1].attributes["stop"] == 5
    assert StepSizes(3, 2, 4, 1, max_query_len=2, max_seq_len=9).symbols() == {"T": 3, "R": 2, "P": 4, "L": 1, "N": 0}


def test_a_graph_crosses_a_process_as_bytes() -> None:
    graph = example()
    assert StepGraph.from_bytes(graph.to_bytes()) == graph


def test_a_graph_is_printed_with_a_line_for_each_node() -> None:
    text = str(example())
    assert "  v0: float32[T, 4, 16] = reshape(x, shape=('T', 4, 16))" in text.splitlines()
    assert text.endswith("return v0: float32[T, 4, 16]")


def test_arrays_are_named_by_their_place_in_the_model() -> None:
    model = nn.Module()
    model.layer = nn.Linear(2, 3, bias=False)
    weight = QuantizedWeight(torch.zeros(2, 2, dtype=torch.int8), torch.ones(2, 1), None, 2, 8)
    model.layer.quantized, model.table = weight, (torch.zeros(1), None)
    found = {name: kind for name, _, kind in named_arrays(model)}
    assert found == {
        "layer.weight": "weight",
        "layer.quantized.values": "weight",
        "layer.quantized.scales": "weight",
        "table.0": "constant",
    }


def test_outside_of_a_trace_operations_run_on_the_host_and_attention_is_an_error() -> None:
    from mvllm_graph.recorded_calls import GraphCache, GraphMetadata, RecordedAttention, recording_providers

    [silu] = [provider for provider in recording_providers(["silu"]) if provider.op == "silu"]
    x = torch.tensor([1.5, -2.0])
    torch.testing.assert_close(silu.function(x), torch.nn.functional.silu(x))
    spec = AttentionSpec(num_heads=1, num_kv_heads=1, head_size=2, scale=1.0, dtype="float32", kv_dtype="float32")
    attention, empty = RecordedAttention(spec), torch.zeros(1, dtype=torch.int32)
    cache = GraphCache(CacheValue("cache.0", "cache", (), "float32", spec, 0))
    with pytest.raises(PlatformError, match="outside of its graph"):
        attention.forward(torch.zeros(1, 1, 2), cache, GraphMetadata(empty, empty, empty, empty))


def test_the_page_has_every_operation() -> None:
    message = "run: python -m plugins.graph.tests.graph_operations_page"
    assert graph_operations_page.PAGE.read_text(encoding="utf-8") == graph_operations_page.page(), message
    assert all(
        f"`{op.name}`" in graph_operations_page.page() for op in GRAPH_OPERATIONS.values() if op.group == "array"
    )


class TestCommand:
    def test_it_lists_what_a_platform_translates(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        prepend(monkeypatch, graph_platform_path(tmp_path))
        assert main(["ops", "--graph", "--platform", "graph-interpreter"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert any(line.split()[:3] == ["yes", "paged_attention", "attention"] for line in lines)
        assert any(line.split()[:3] == ["unused", "linear_silu_and_mul", "optional"] for line in lines)

    def test_it_prints_the_graph_form_of_operations_on_a_state(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["ops", "--graph", "causal_conv1d"]) == 0
        form = capsys.readouterr().out.partition("In a graph:\n")[2]
        assert "inputs: x, weight, bias, state, query_start_loc, read_slots, write_slots;" in form
        assert "attributes: activation\n" in form and "updated: state," in form and "max_query_len: no" in form

    def test_it_prints_definitions(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["ops", "--graph", "permute"]) == 0
        assert capsys.readouterr().out == ("permute (array)\n\nDimension i of the result is dimension dims[i] of x.\n")

    def test_a_platform_without_a_compiler_and_an_unknown_operation_are_errors(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["ops", "--graph", "--platform", "cpu"]) != 0
        assert "has no graph compiler" in capsys.readouterr().err
        assert main(["ops", "--graph", "convolve"]) != 0
        assert "Unknown operation 'convolve'" in capsys.readouterr().err

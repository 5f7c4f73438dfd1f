"""What happens to named operations that a compiler does not name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from mvllm.errors import PlatformError
from mvllm.ops.dtypes import dtype_name
from mvllm.platform.attention import AttentionSpec
from mvllm.platform.step_graph import Node, StepGraph, StepSizes, Value
from mvllm_graph import Interpreter
from mvllm_graph.arguments import flatten, unflatten
from mvllm_graph.arrays import to_numpy
from mvllm_graph.aten import ArrayOperationWriter
from mvllm_graph.missing_operations import check_translated, missing_operations
from mvllm_graph.one_node import OneNodeAttention
from mvllm_graph.operations import GRAPH_OPERATIONS, NEVER_TRACED
from mvllm_graph.recorded_calls import recording_providers

NAMED = {op.name: op for op in GRAPH_OPERATIONS.values() if op.group == "named"}
TRACED = [name for name, op in NAMED.items() if op.if_left_out == "traced"]
ARRAY = frozenset(op.name for op in GRAPH_OPERATIONS.values() if op.group == "array")
ELEMENTWISE = (
    *("relu", "relu_squared", "gelu", "gelu_tanh", "quick_gelu", "silu", "tanh", "sigmoid"),
    *("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"),
)
SIZES = StepSizes(1, 1, 1, 1, max_query_len=1, max_seq_len=1)


def trace_definition(name: str, arguments: tuple[object, ...]) -> tuple[StepGraph, list[torch.Tensor]]:
    """The definition of an operation as a graph of a compiler that names array operations only, and its inputs."""
    reference = NAMED[name].reference
    assert reference is not None
    flat = flatten(reference, arguments)
    places = [i for i, array in enumerate(flat.inputs) if array is not None]
    arrays = [flat.inputs[i] for i in places]

    def run(*given: torch.Tensor) -> object:
        inputs = list(flat.inputs)
        for i, array in zip(places, given, strict=True):
            inputs[i] = array
        return reference(*unflatten(reference, inputs, flat.attributes))

    writer, inputs, outputs = ArrayOperationWriter({}, ARRAY), [], ()
    for node in make_fx(run, tracing_mode="fake")(*arrays).graph.nodes:
        if node.op == "placeholder":
            writer.names[node] = f"x{len(inputs)}"
            inputs.append(writer.value(writer.names[node], "step", node.meta["val"]))
        elif node.op == "output":
            found = node.args[0] if isinstance(node.args[0], tuple | list) else [node.args[0]]
            outputs = tuple(writer.names[each] for each in found)
        elif node.op == "call_function":
            writer.write(node)
    return StepGraph("op", tuple(inputs), tuple(writer.nodes), outputs), arrays


@pytest.mark.parametrize("name", TRACED)
def test_the_definition_of_a_traced_operation_is_array_operations(name: str) -> None:
    op_cases = pytest.importorskip("mvllm.testing.op_cases", reason="mvllm-conformance has the arguments")
    case = next(op_cases.op_calls(name, "float32"))
    graph, _ = trace_definition(name, case.make())
    assert graph.nodes and {node.op for node in graph.nodes} <= ARRAY


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_activation_as_array_operations_gives_its_values(name: str, dtype: torch.dtype) -> None:
    x = torch.cat([torch.linspace(-12, 12, 1000), torch.tensor([0.0, -0.0, 1e-6, -1e-6, 200.0, -200.0])]).to(dtype)
    graph, arrays = trace_definition(name, (x,))
    program = Interpreter().program([graph])
    assert graph.values()[graph.outputs[0]].dtype == dtype_name(dtype)
    [result] = program.run("op", {"x0": to_numpy(arrays[0])}, SIZES)
    expected = NAMED[name].reference(x)  # type: ignore[misc]
    # erf has an error of 1.5e-7, which *_and_mul multiply by up to 200; graphs round constants to the array's dtype.
    absolute, relative = (1e-5, 2e-6) if dtype == torch.float32 else (4e-3, 1 / 64)
    torch.testing.assert_close(result, expected, atol=absolute, rtol=relative)


def test_operations_that_are_never_traced_are_nodes_for_every_compiler() -> None:
    assert {name for name, op in NAMED.items() if op.if_left_out == "refused"} == NEVER_TRACED
    assert {provider.op for provider in recording_providers(["silu"])} == NEVER_TRACED | {"silu"}


def test_a_refusal_names_all_missing_operations_and_how_to_read_them() -> None:
    x = Value("x", "step", ("T", 4), "float32")
    results = [Value(f"v{i}", "result", ("T", 4), "float32") for i in range(3)]
    nodes = [Node(op, ("x",), (result,)) for op, result in zip(("layer_norm", "ssd", "neg"), results, strict=True)]
    graph = StepGraph("model", (x,), tuple(nodes), ("v2",))
    compiler = Interpreter(without=("ssd", "layer_norm"))
    assert missing_operations([graph], compiler) == ["layer_norm", "ssd"]
    check_translated([graph], Interpreter(), "Mamba")
    with pytest.raises(PlatformError, match=r"cannot run Mamba.*mvllm ops --graph layer_norm ssd"):
        check_translated([graph], compiler, "Mamba")


def test_attention_refuses_a_cache_dtype_that_the_platform_does_not_claim() -> None:
    """The interpreter itself stores any dtype, so the platform's base class compares it with the claimed ones."""
    backend = OneNodeAttention.of(Interpreter(), ("float32", "bfloat16"))
    spec = AttentionSpec(2, 2, 16, "float32", "float32", 0.25)
    assert backend.validate(spec) == []
    assert backend.validate(replace(spec, kv_dtype="int8")) == [
        "the KV cache is stored as float32 or bfloat16, not as int8"
    ]

"""Every translated operation gives the results of its definition, with sizes that are known only when it runs."""

from __future__ import annotations

import pytest

pytest.importorskip("openvino", reason="openvino is not installed: python3 ci/matrix.py run openvino installs it")

import numpy as np
import torch
from platforms.openvino.tests.one_node import T, Weight, check, expected, run

from mvllm.ops.quantized_linear import QuantizedWeight, quantized_linear
from mvllm_graph import GRAPH_OPERATIONS, Node, StepGraph, StepSizes, Value
from mvllm_openvino.compiler import TABLE, OpenVINOCompiler


def real(*sizes, seed=0):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed + sum(sizes)))


def whole(high, *sizes, dtype=torch.int32):
    return torch.randint(0, high, sizes, generator=torch.Generator().manual_seed(high), dtype=dtype)


def weight(*sizes):
    return Weight(real(*sizes, seed=7))


X, Y, POSITIVE = real(T, 4), real(T, 4, seed=1), real(T, 4).abs() + 0.1
CUBE = real(T, 4, 3)
PLACES = torch.tensor([[0, 1], [2, 3], [1, 0], [3, 2], [0, 2]])
PAIRS = ("add", "sub", "mul", "div", "maximum", "minimum", "eq", "lt", "le")
ARRAY_CASES = [
    *((op, (X, Y), {}) for op in PAIRS),
    *((op, (X, real(4)), {}) for op in PAIRS),
    *((op, (X, None), {"other": 0.5}) for op in PAIRS),
    ("sub", (None, X), {"other": 2.0}),
    ("div", (None, POSITIVE), {"other": 2.0}),
    ("add", (whole(9, T), None), {"other": 3}),
    ("mul", (whole(9, T), whole(9, T)), {}),
    ("lt", (whole(9, T), None), {"other": 4}),
    ("floor_div", (X, None), {"other": 0.3}),
    ("floor_div", (whole(9, T) - 4, None), {"other": 3}),
    ("floor_div", (whole(9, T, dtype=torch.int64) - 4, None), {"other": -3}),
    ("pow", (X, None), {"other": 2.0}),
    ("pow", (POSITIVE, real(4)), {}),
    ("pow", (None, X), {"other": 3.0}),
    ("logical_and", (X > 0, Y > 0), {}),
    ("logical_not", (X > 0,), {}),
    *((op, (X,), {}) for op in ("neg", "exp", "sin", "cos")),
    *((op, (POSITIVE,), {}) for op in ("log", "sqrt", "rsqrt")),
    ("softplus", (X * 30,), {}),
    ("softmax", (X,), {"dim": -1}),
    ("softmax", (X,), {"dim": 0}),
    ("where", (X > 0, X, real(4)), {}),
    ("where", (X > 0, X, None), {"other": float("-inf")}),
    ("where", (X[:, :1] > 0, None, X), {"other": 1.0}),
    ("clamp", (X,), {"min": -0.5, "max": None}),
    ("clamp", (X,), {"min": None, "max": 0.25}),
    *((op, (CUBE,), {"dims": (-1,), "keepdim": True}) for op in ("sum", "mean", "max")),
    *((op, (CUBE,), {"dims": (1, 2), "keepdim": False}) for op in ("sum", "mean", "max")),
    ("topk", (real(T, 9),), {"k": 3, "dim": -1}),
    ("matmul", (X, real(4, 3)), {}),
    ("matmul", (real(T, 3, 4), real(T, 4, 2)), {}),
    ("reshape", (real(T, 12),), {"shape": ("T", 3, 4)}),
    ("reshape", (real(T, 12),), {"shape": ("3*T", 4)}),
    ("permute", (CUBE,), {"dims": (1, 0, 2)}),
    ("expand", (real(T, 1),), {"shape": ("T", 7)}),
    ("expand", (real(7),), {"shape": ("T", 7)}),
    ("slice", (real(T, 12),), {"dim": 1, "start": 2, "stop": 10, "step": 3}),
    ("slice", (real(T, 12),), {"dim": 0, "start": 1, "stop": "T", "step": 1}),
    ("cat", (X, Y), {"dim": 1}),
    ("index_select", (X, whole(T, T)), {"dim": 0}),
    ("index_select", (X, torch.tensor([3, 1])), {"dim": 1}),
    ("gather", (X, PLACES), {"dim": 1}),
    ("scatter", (X, PLACES, real(T, 2)), {"dim": 1}),
    ("scatter", (X, PLACES, None), {"dim": 1, "other": 7.0}),
    ("cumsum", (X,), {"dim": 0}),
    ("to_dtype", (X * 3,), {"dtype": "int32"}),
    ("to_dtype", (whole(3, T),), {"dtype": "bool"}),
    ("to_dtype", (X > 0,), {"dtype": "float32"}),
    ("full", (), {"shape": ("T", 3), "value": 2.5, "dtype": "float32"}),
    ("arange", (), {"start": 0, "stop": "T", "step": 1, "dtype": "int64"}),
    ("arange", (), {"start": 2, "stop": 9, "step": 3, "dtype": "int32"}),
]

ROWS, HEADS = real(T, 16), (real(T, 4, 16), real(T, 2, 16))
ROUTING = (torch.tensor([[0, 2], [2, 1], [3, 2], [2, 0], [1, 3]]), real(T, 2).abs())
GATED = (weight(4, 24, 16), weight(4, 16, 12))
PLAIN = {"normalize": True, "scale": 1.5, "num_groups": 1, "top_groups": 1, "group_by": "best", "top_k": 2}
NAMED_CASES = [
    ("linear", (ROWS, weight(8, 16), weight(8)), {}),
    ("linear", (real(T, 2, 16), weight(8, 16), None), {}),
    ("embedding", (whole(9, T), weight(9, 4)), {"first": None}),
    ("embedding", (whole(9, T), weight(4, 4)), {"first": 3}),
    ("rms_norm", (real(T, 3, 16), weight(16)), {"eps": 1e-5}),
    ("fused_add_rms_norm", (ROWS, real(T, 16, seed=3), weight(16)), {"eps": 1e-6}),
    ("layer_norm", (ROWS, weight(16), weight(16)), {"eps": 1e-5}),
    ("layer_norm", (ROWS, weight(16), None), {"eps": 1e-5}),
    ("layer_norm", (ROWS, None, None), {"eps": 1e-5}),
    ("rotary_embedding", (whole(30, T), *HEADS, weight(30, 16)), {}),
    ("rotary_embedding", (whole(30, T), *HEADS, weight(30, 8)), {}),
    *((op, (ROWS,), {}) for op in ("relu", "relu_squared", "gelu", "gelu_tanh", "quick_gelu", "silu", "tanh")),
    *((op, (ROWS,), {}) for op in ("sigmoid", "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul")),
    ("moe", (ROWS, *GATED, *ROUTING), {}),
    ("gelu_tanh_moe", (ROWS, *GATED, *ROUTING), {}),
    (
        "clamped_moe",
        (ROWS, GATED[0], weight(4, 24), GATED[1], weight(4, 16), *ROUTING),
        {"alpha": 1.702, "limit": 2.0},
    ),
    *(
        ("ungated_moe", (ROWS, weight(4, 12, 16), GATED[1], *ROUTING), {"activation": name})
        for name in ("relu", "relu_squared", "silu")
    ),
    *(("select_experts", (real(T, 8), weight(8)), PLAIN | {"scores": name}) for name in ("softmax", "sigmoid")),
    ("select_experts", (real(T, 8), None), PLAIN | {"scores": "softmax_of_chosen", "normalize": False}),
    *(
        (
            "select_experts",
            (real(T, 8), weight(8)),
            PLAIN | {"scores": "sigmoid", "num_groups": 4, "top_groups": 2, "group_by": name},
        )
        for name in ("best", "best_two")
    ),
]


@pytest.mark.parametrize(("op", "arguments", "attributes"), [*ARRAY_CASES, *NAMED_CASES])
def test_the_result_is_that_of_the_definition(op, arguments, attributes):
    check(op, *arguments, attributes=attributes)


def test_every_translated_operation_has_a_case():
    covered = {case[0] for case in (*ARRAY_CASES, *NAMED_CASES)}
    assert set(TABLE) - covered == {"paged_attention", "quantized_linear"}
    assert set(TABLE) <= set(GRAPH_OPERATIONS)


def test_a_token_may_have_all_experts_and_an_expert_no_token():
    routing = (torch.tensor([[3, 0], [0, 3], [3, 0], [0, 3], [3, 0]]), ROUTING[1])
    check("moe", ROWS, *GATED, *routing, attributes={})
    assert len(run("moe", ROWS, *GATED, *routing)) == len(expected("moe", ROWS, *GATED, *routing)) == 1


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("group_size", "columns"), [(32, 64), (64, 64), (16, 40), (7, 21)])
@pytest.mark.parametrize("has_zero_points", [False, True])
@pytest.mark.parametrize("int8_activations", [False, True])
def test_products_with_integer_weights_are_those_of_the_definition(
    bits, group_size, columns, has_zero_points, int8_activations
):
    low, high, groups = -(2 ** (bits - 1)), 2 ** (bits - 1), -(-columns // group_size)
    generator = torch.Generator().manual_seed(bits)
    values, zeros = (
        torch.randint(low, high, size, generator=generator, dtype=torch.int8) for size in ((24, columns), (24, groups))
    )
    given = QuantizedWeight(
        values, real(24, groups).abs() + 0.1, zeros if has_zero_points else None, group_size, bits, int8_activations
    )
    x, bias = real(T, columns), real(24)
    arrays = {"values": values, "scales": given.scales, "zeros": given.zero_points, "bias": bias}
    arrays = {name: tensor.numpy() for name, tensor in arrays.items() if tensor is not None}
    inputs = [Value(name, "weight", array.shape, str(array.dtype)) for name, array in arrays.items()]
    attributes = {"group_size": group_size, "bits": bits, "int8_activations": int8_activations}
    node = Node(
        "quantized_linear",
        ("x", "values", "scales", "zeros" if has_zero_points else None, "bias"),
        (Value("y", "result", ("T", 24), "float32"),),
        {f"weight.{name}": entry for name, entry in attributes.items()},
    )
    graph = StepGraph("model", (Value("x", "step", ("T", columns), "float32"), *inputs), (node,), ("y",))
    program = OpenVINOCompiler().program([graph])
    for name, array in arrays.items():
        program.set_weight(name, array)
    program.finish_weights()
    [result] = program.run("model", {"x": x.numpy()}, StepSizes(T, 1, 1, 1, T, T))
    wanted = quantized_linear(x, given, bias).numpy()
    np.testing.assert_allclose(program.to_host(result), wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())

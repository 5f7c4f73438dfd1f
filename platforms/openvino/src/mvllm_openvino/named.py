"""Lowerings of the named operations: linear maps, norms, rotary embedding, activations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from openvino import Type
from openvino import opset15 as op

from mvllm_graph import Node
from mvllm_openvino.building import Building, Lowering, Out, constant, integers
from mvllm_openvino.quantized import quantized_weight


def scalar(value: float) -> Out:
    """A float32 constant."""
    return constant(np.float32(value), Type.f32)


def halves(x: Out) -> tuple[Out, Out]:
    """The two halves of the last dimension."""
    parts = op.split(x, constant(-1, Type.i64), 2)
    return parts.output(0), parts.output(1)


def linear(building: Building, node: Node) -> Sequence[Out]:
    """x · weightᵀ + bias."""
    x, weight, bias = building.inputs(node)
    return [_with_bias(op.matmul(x, weight, False, True).output(0), bias)]


def quantized_linear(building: Building, node: Node) -> Sequence[Out]:
    """As `linear`, with a weight of integers that stays compressed in memory."""
    x, bias = building.output(str(node.inputs[0])), node.inputs[-1]
    scale = None
    if node.attributes["weight.int8_activations"]:
        x, scale = _rounded_rows(x)
    made = op.matmul(x, quantized_weight(building, node), False, True).output(0)
    if scale is not None:
        made = op.multiply(made, scale).output(0)
    return [_with_bias(made, None if bias is None else building.output(bias))]


def _rounded_rows(x: Out) -> tuple[Out, Out]:
    """Each row rounded to integers of at most 127, and its scale."""
    largest = op.reduce_max(op.absolute(x), integers([-1]), True)
    scale = op.divide(largest, scalar(127.0)).output(0)
    divisor = op.select(op.greater(scale, scalar(0.0)), scale, scalar(1.0))
    return op.clamp(op.round(op.divide(x, divisor), "half_to_even"), -127.0, 127.0).output(0), scale


def _with_bias(x: Out, bias: Out | None) -> Out:
    return x if bias is None else op.add(x, bias).output(0)


def embedding(building: Building, node: Node) -> Sequence[Out]:
    """Rows of a table; zeros for ids outside of it if the table is a part."""
    ids, weight = building.inputs(node)[:2]
    first = node.attributes.get("first")
    zero = constant(0, Type.i64)
    if first is None:
        return [op.gather(weight, ids, zero).output(0)]
    rows = building.values[str(node.inputs[1])].shape[0]
    dtype = ids.get_element_type()
    local = op.subtract(ids, constant(first, dtype))
    low = op.greater_equal(local, constant(0, dtype))
    here = op.logical_and(low, op.less(local, constant(rows, dtype)))
    found = op.gather(weight, op.select(here, local, constant(0, dtype)), zero)
    return [op.select(op.unsqueeze(here, integers([-1])), found, scalar(0.0)).output(0)]


def _rms_norm(x: Out, weight: Out, eps: float) -> Out:
    """The pattern that the processor's plugin turns into one operation."""
    mean = op.reduce_mean(op.power(x, scalar(2.0)), integers([-1]), True)
    root = op.sqrt(op.add(mean, scalar(eps)))
    normed = op.multiply(x, op.divide(scalar(1.0), root))
    return op.multiply(normed, weight).output(0)


def rms_norm(building: Building, node: Node) -> Sequence[Out]:
    """x divided by its root mean square, times weight."""
    x, weight = building.inputs(node)[:2]
    return [_rms_norm(x, weight, node.attributes["eps"])]


def fused_add_rms_norm(building: Building, node: Node) -> Sequence[Out]:
    """The normalised sum, and the sum."""
    x, residual, weight = building.inputs(node)[:3]
    total = op.add(residual, x).output(0)
    return [_rms_norm(total, weight, node.attributes["eps"]), total]


def layer_norm(building: Building, node: Node) -> Sequence[Out]:
    """(x - mean) / standard deviation, times weight, plus bias."""
    x, weight, bias = building.inputs(node)[:3]
    made = op.mvn(x, integers([-1]), True, node.attributes["eps"], "inside_sqrt").output(0)
    if weight is not None:
        made = op.multiply(made, weight).output(0)
    return [_with_bias(made, bias)]


def rotary_embedding(building: Building, node: Node) -> Sequence[Out]:
    """Rotates the leading elements of each head by the angles of its token."""
    index, query, key, cos_sin = building.inputs(node)[:4]

    def angles() -> tuple[Out, Out]:
        """Cosines and sines for both halves of the rotated elements: [T, 1, 1, rotary_dim]."""
        rows = op.unsqueeze(op.gather(cos_sin, index, constant(0, Type.i64)), integers([1, 2])).output(0)
        cos, sin = (op.concat([half, half], -1).output(0) for half in halves(rows))
        return cos, sin

    cos, sin = building.once(("angles", node.inputs[0], node.inputs[3]), angles)
    rotary_dim = int(building.values[str(node.inputs[3])].shape[-1])
    return [_rotated(building, x, cos, sin, rotary_dim, node, i) for i, x in ((1, query), (2, key))]


def _rotated(building: Building, x: Out, cos: Out, sin: Out, rotary_dim: int, node: Node, index: int) -> Out:
    """x · cos + (-second half, first half) · sin: the pattern that the processor's plugin turns into one operation."""
    shape = building.values[str(node.inputs[index])].shape
    heads, size = int(shape[-2]), int(shape[-1])
    x = op.reshape(x, integers([-1, heads, 1, size]), False).output(0)
    rest = None
    if size > rotary_dim:
        parts = op.variadic_split(x, constant(3, Type.i64), integers([rotary_dim, size - rotary_dim]))
        x, rest = parts.output(0), parts.output(1)
    half = rotary_dim // 2
    parts = op.variadic_split(x, constant(3, Type.i64), integers([half, half]))
    turned = op.concat([op.multiply(parts.output(1), scalar(-1.0)).output(0), parts.output(0)], -1)
    made = op.add(op.multiply(x, cos), op.multiply(turned, sin)).output(0)
    if rest is not None:
        made = op.concat([made, rest], -1).output(0)
    return op.reshape(made, integers([-1, heads, size]), False).output(0)


# ------------------------------------------------------------------------------------------------------- activations


def activate(name: str, x: Out) -> Out:
    """One of the elementwise activations."""
    if name == "relu_squared":
        positive = op.relu(x)
        return op.multiply(positive, positive).output(0)
    if name == "quick_gelu":
        return op.multiply(x, op.sigmoid(op.multiply(x, scalar(1.702)))).output(0)
    made = {
        "relu": op.relu,
        "gelu": lambda y: op.gelu(y, "erf"),
        "gelu_tanh": lambda y: op.gelu(y, "tanh"),
        "silu": op.swish,
        "tanh": op.tanh,
        "sigmoid": op.sigmoid,
    }[name](x)
    return made.output(0)


def _activation(name: str) -> Lowering:
    return lambda building, node: [activate(name, building.output(str(node.inputs[0])))]


def _gated_activation(name: str) -> Lowering:
    def lower(building: Building, node: Node) -> Sequence[Out]:
        gate, up = halves(building.output(str(node.inputs[0])))
        return [op.multiply(activate(name, gate), up).output(0)]

    return lower


NAMED: dict[str, Lowering] = {
    "linear": linear,
    "quantized_linear": quantized_linear,
    "embedding": embedding,
    "rms_norm": rms_norm,
    "fused_add_rms_norm": fused_add_rms_norm,
    "layer_norm": layer_norm,
    "rotary_embedding": rotary_embedding,
    **{
        name: _activation(name)
        for name in ("relu", "relu_squared", "gelu", "gelu_tanh", "quick_gelu", "silu", "tanh", "sigmoid")
    },
    **{f"{name}_and_mul": _gated_activation(name) for name in ("silu", "gelu", "gelu_tanh")},
}

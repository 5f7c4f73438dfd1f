"""Lowerings of the array operations, with torch's semantics: elementwise ones, reductions and changes of shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from openvino import Type
from openvino import opset15 as op

from mvllm_graph import Node
from mvllm_openvino.building import Building, Lowering, Out, computed_type, constant, integers, is_symbolic


def _operands(building: Building, node: Node) -> tuple[Out, Out]:
    """The last two inputs of a node; the attribute `other` in place of the one that is absent."""
    x, y = building.inputs(node)[-2:]
    given = x if x is not None else y
    if x is None or y is None:
        other = _number(building, node.attributes["other"], given.get_element_type())
        return (other, y) if x is None else (x, other)
    return x, y


def _number(building: Building, value: Any, dtype: Type) -> Out:
    """A number, or a size that is not known yet, as a scalar."""
    if is_symbolic(value):
        return op.convert(op.squeeze(building.size(value), integers([0])), dtype).output(0)
    return constant(np.array(value).astype(dtype.to_dtype()), dtype)


def _binary(make: Callable[..., Any]) -> Lowering:
    return lambda building, node: [make(*_operands(building, node)).output(0)]


def _unary(make: Callable[..., Any]) -> Lowering:
    return lambda building, node: [make(building.output(str(node.inputs[0]))).output(0)]


def _floor_div(x: Out, y: Out) -> Out:
    if x.get_element_type().is_real():
        return op.floor(op.divide(x, y))
    # OpenVINO's quotient of integers on the processor is rounded towards zero.
    return op.divide(op.subtract(x, op.floor_mod(x, y)), y)


def _softplus(x: Out) -> Out:
    return op.select(op.greater(x, constant(np.float32(20), Type.f32)), x, op.softplus(x))


def _rsqrt(x: Out) -> Out:
    return op.divide(constant(np.float32(1), Type.f32), op.sqrt(x))


def _where(building: Building, node: Node) -> Sequence[Out]:
    x, y = _operands(building, node)
    return [op.select(building.output(str(node.inputs[0])), x, y).output(0)]


def _clamp(building: Building, node: Node) -> Sequence[Out]:
    x = building.output(str(node.inputs[0]))
    dtype = x.get_element_type()
    if (low := node.attributes.get("min")) is not None:
        x = op.maximum(x, _number(building, low, dtype)).output(0)
    if (high := node.attributes.get("max")) is not None:
        x = op.minimum(x, _number(building, high, dtype)).output(0)
    return [x]


def _reduction(make: Callable[..., Any]) -> Lowering:
    def lower(building: Building, node: Node) -> Sequence[Out]:
        x, dims = building.output(str(node.inputs[0])), node.attributes["dims"]
        axes = dims if dims else range(len(building.values[str(node.inputs[0])].shape))
        return [make(x, integers(list(axes)), bool(node.attributes["keepdim"])).output(0)]

    return lower


def _softmax(building: Building, node: Node) -> Sequence[Out]:
    return [op.softmax(building.output(str(node.inputs[0])), int(node.attributes["dim"])).output(0)]


def _topk(building: Building, node: Node) -> Sequence[Out]:
    x, k = building.output(str(node.inputs[0])), node.attributes["k"]
    axis = int(node.attributes["dim"])
    made = op.topk(x, constant(k, Type.i64), axis, "max", "value", index_element_type="i64", stable=True)
    return [made.output(0), made.output(1)]


def _matmul(building: Building, node: Node) -> Sequence[Out]:
    x, y = building.inputs(node)
    return [op.matmul(x, y, False, False).output(0)]


def _reshape(building: Building, node: Node) -> Sequence[Out]:
    return [building.reshape(building.output(str(node.inputs[0])), node.attributes["shape"])]


def _permute(building: Building, node: Node) -> Sequence[Out]:
    return [op.transpose(building.output(str(node.inputs[0])), integers(node.attributes["dims"])).output(0)]


def _expand(building: Building, node: Node) -> Sequence[Out]:
    x = building.output(str(node.inputs[0]))
    return [op.broadcast(x, building.sizes(node.outputs[0].shape), broadcast_spec="NUMPY").output(0)]


def _slice(building: Building, node: Node) -> Sequence[Out]:
    x, attributes = building.output(str(node.inputs[0])), node.attributes
    bounds = [building.size(attributes[name]) for name in ("start", "stop", "step")]
    return [op.slice(x, *bounds, integers([attributes["dim"]])).output(0)]


def _cat(building: Building, node: Node) -> Sequence[Out]:
    return [op.concat(building.inputs(node), int(node.attributes["dim"])).output(0)]


def _index_select(building: Building, node: Node) -> Sequence[Out]:
    x, index = building.inputs(node)
    return [op.gather(x, index, constant(node.attributes["dim"], Type.i64)).output(0)]


def _gather(building: Building, node: Node) -> Sequence[Out]:
    x, index = building.inputs(node)
    return [op.gather_elements(x, index, int(node.attributes["dim"])).output(0)]


def _scatter(building: Building, node: Node) -> Sequence[Out]:
    x, index, source = building.inputs(node)
    if source is None:
        value = _number(building, node.attributes["other"], x.get_element_type())
        source = op.broadcast(value, op.shape_of(index, Type.i64)).output(0)
    return [op.scatter_elements_update(x, index, source, constant(node.attributes["dim"], Type.i64)).output(0)]


def _cumsum(building: Building, node: Node) -> Sequence[Out]:
    return [op.cum_sum(building.output(str(node.inputs[0])), constant(node.attributes["dim"], Type.i64)).output(0)]


def _to_dtype(building: Building, node: Node) -> Sequence[Out]:
    """Conversions between real types do nothing, since all are computed as float32."""
    x, wanted = building.output(str(node.inputs[0])), computed_type(node.attributes["dtype"])
    if x.get_element_type() == wanted:
        return [x]
    if wanted == Type.boolean:
        return [op.not_equal(x, constant(0, x.get_element_type())).output(0)]
    return [op.convert(x, wanted).output(0)]


def _full(building: Building, node: Node) -> Sequence[Out]:
    value = _number(building, node.attributes["value"], computed_type(node.attributes["dtype"]))
    return [op.broadcast(value, building.sizes(node.attributes["shape"])).output(0)]


def _arange(building: Building, node: Node) -> Sequence[Out]:
    attributes = node.attributes
    bounds = [_number(building, attributes[name], Type.i64) for name in ("start", "stop", "step")]
    made = op.range(*bounds, Type.i64)
    return [op.convert(made, computed_type(attributes["dtype"])).output(0)]


ARRAYS: dict[str, Lowering] = {
    "add": _binary(op.add),
    "sub": _binary(op.subtract),
    "mul": _binary(op.multiply),
    "div": _binary(op.divide),
    "floor_div": _binary(_floor_div),
    "pow": _binary(op.power),
    "maximum": _binary(op.maximum),
    "minimum": _binary(op.minimum),
    "eq": _binary(op.equal),
    "lt": _binary(op.less),
    "le": _binary(op.less_equal),
    "logical_and": _binary(op.logical_and),
    "logical_not": _unary(op.logical_not),
    "neg": _unary(op.negative),
    "exp": _unary(op.exp),
    "log": _unary(op.log),
    "sqrt": _unary(op.sqrt),
    "rsqrt": _unary(_rsqrt),
    "sin": _unary(op.sin),
    "cos": _unary(op.cos),
    "softplus": _unary(_softplus),
    "softmax": _softmax,
    "where": _where,
    "clamp": _clamp,
    "sum": _reduction(op.reduce_sum),
    "mean": _reduction(op.reduce_mean),
    "max": _reduction(op.reduce_max),
    "topk": _topk,
    "matmul": _matmul,
    "reshape": _reshape,
    "permute": _permute,
    "expand": _expand,
    "slice": _slice,
    "cat": _cat,
    "index_select": _index_select,
    "gather": _gather,
    "scatter": _scatter,
    "cumsum": _cumsum,
    "to_dtype": _to_dtype,
    "full": _full,
    "arange": _arange,
}

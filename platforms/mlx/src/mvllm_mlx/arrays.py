"""Lowerings of the array operations: elementwise operations, reductions and changes of shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mvllm_graph import Node
from mvllm_mlx.lowering import DTYPES, Lowering, Run
from mvllm_mlx.named import softplus


def _operands(run: Run, node: Node) -> tuple[Any, Any]:
    """The last two inputs; the attribute `other`, in the dtype of the other operand, in place of an absent one."""
    x, y = run.inputs(node)[-2:]
    other: Any = node.attributes.get("other")
    if x is None:
        return mx.array(other, dtype=y.dtype), y
    return x, (mx.array(other, dtype=x.dtype) if y is None else y)


def _binary(function: Callable[[Any, Any], Any]) -> Lowering:
    return lambda run, node: [function(*_operands(run, node))]


def _unary(function: Callable[[Any], Any]) -> Lowering:
    return lambda run, node: [function(run.values[str(node.inputs[0])])]


def _of_dim(function: Callable[[Any, int], Any]) -> Lowering:
    return lambda run, node: [function(run.values[str(node.inputs[0])], node.attributes["dim"])]


def _reduction(function: Callable[..., Any]) -> Lowering:
    def lower(run: Run, node: Node) -> Sequence[Any]:
        x = run.values[str(node.inputs[0])]
        made = function(x, axis=tuple(node.attributes["dims"]), keepdims=node.attributes["keepdim"])
        return [made if made.dtype == x.dtype else made.astype(x.dtype)]

    return lower


def where(run: Run, node: Node) -> Sequence[Any]:
    """x where the condition holds, else y."""
    x, y = _operands(run, node)
    return [mx.where(run.values[str(node.inputs[0])], x, y)]


def clamp(run: Run, node: Node) -> Sequence[Any]:
    """Bounds; None for no bound."""
    low, high = node.attributes["min"], node.attributes["max"]
    return [mx.clip(run.values[str(node.inputs[0])], low, high)]


def topk(run: Run, node: Node) -> Sequence[Any]:
    """The k largest elements, the largest first, and their indices."""
    x, k, dim = run.values[str(node.inputs[0])], node.attributes["k"], node.attributes["dim"]
    order = mx.take(mx.argsort(-x, axis=dim), mx.arange(k), axis=dim)
    return [mx.take_along_axis(x, order, axis=dim), order.astype(mx.int64)]


def slice_dim(run: Run, node: Node) -> Sequence[Any]:
    """A range of one dimension."""
    x, given = run.values[str(node.inputs[0])], node.attributes
    index = [slice(None)] * x.ndim
    index[given["dim"]] = slice(run.size(given["start"]), run.size(given["stop"]), given["step"])
    return [x[tuple(index)]]


def cat(run: Run, node: Node) -> Sequence[Any]:
    """Concatenation along a dimension."""
    return [mx.concatenate(run.inputs(node), axis=node.attributes["dim"])]


def index_select(run: Run, node: Node) -> Sequence[Any]:
    """Rows of one dimension."""
    x, index = run.inputs(node)
    return [mx.take(x, index, axis=node.attributes["dim"])]


def gather(run: Run, node: Node) -> Sequence[Any]:
    """Elements by index along a dimension."""
    x, index = run.inputs(node)
    return [mx.take_along_axis(x, index, axis=node.attributes["dim"])]


def scatter(run: Run, node: Node) -> Sequence[Any]:
    """x with some elements along a dimension replaced."""
    x, index, source = run.inputs(node)
    if source is None:
        source = mx.array(node.attributes["other"], dtype=x.dtype)
    return [mx.put_along_axis(x, index, source, axis=node.attributes["dim"])]


def reshape(run: Run, node: Node) -> Sequence[Any]:
    """The same elements in another shape."""
    return [run.values[str(node.inputs[0])].reshape(run.sizes(node.attributes["shape"]))]


def permute(run: Run, node: Node) -> Sequence[Any]:
    """Another order of dimensions."""
    return [mx.transpose(run.values[str(node.inputs[0])], node.attributes["dims"])]


def expand(run: Run, node: Node) -> Sequence[Any]:
    """Repeats dimensions of size 1."""
    return [mx.broadcast_to(run.values[str(node.inputs[0])], run.sizes(node.attributes["shape"]))]


def to_dtype(run: Run, node: Node) -> Sequence[Any]:
    """Conversion."""
    return [run.values[str(node.inputs[0])].astype(DTYPES[node.attributes["dtype"]])]


def full(run: Run, node: Node) -> Sequence[Any]:
    """An array of one value."""
    given = node.attributes
    return [mx.full(run.sizes(given["shape"]), given["value"], dtype=DTYPES[given["dtype"]])]


def arange(run: Run, node: Node) -> Sequence[Any]:
    """Numbers with equal steps."""
    given = node.attributes
    start, stop = run.size(given["start"]), run.size(given["stop"])
    return [mx.arange(start, stop, given["step"], dtype=DTYPES[given["dtype"]])]


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": mx.add,
    "sub": mx.subtract,
    "mul": mx.multiply,
    "div": mx.divide,
    "floor_div": mx.floor_divide,
    "pow": mx.power,
    "maximum": mx.maximum,
    "minimum": mx.minimum,
    "eq": mx.equal,
    "lt": mx.less,
    "le": mx.less_equal,
    "logical_and": mx.logical_and,
    "matmul": mx.matmul,
}
_UNARY: dict[str, Callable[[Any], Any]] = {
    "logical_not": mx.logical_not,
    "neg": mx.negative,
    "exp": mx.exp,
    "log": mx.log,
    "sqrt": mx.sqrt,
    "rsqrt": mx.rsqrt,
    "sin": mx.sin,
    "cos": mx.cos,
    "softplus": softplus,
}
ARRAYS: dict[str, Lowering] = {
    **{name: _binary(function) for name, function in _BINARY.items()},
    **{name: _unary(function) for name, function in _UNARY.items()},
    "softmax": _of_dim(lambda x, dim: mx.softmax(x, axis=dim, precise=True)),
    "cumsum": _of_dim(lambda x, dim: mx.cumsum(x, axis=dim).astype(x.dtype)),
    "sum": _reduction(mx.sum),
    "mean": _reduction(mx.mean),
    "max": _reduction(mx.max),
    "where": where,
    "clamp": clamp,
    "topk": topk,
    "slice": slice_dim,
    "cat": cat,
    "index_select": index_select,
    "gather": gather,
    "scatter": scatter,
    "reshape": reshape,
    "permute": permute,
    "expand": expand,
    "to_dtype": to_dtype,
    "full": full,
    "arange": arange,
}
"""The lowerings by name."""

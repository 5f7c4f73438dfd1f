"""The array operations of StepGraphs: a small closed set with torch's semantics.

Each function is the operation's definition; its name is the operation's name, positional parameters are the inputs, and
keyword parameters the attributes. Two inputs of an elementwise operation have equal dtypes and are broadcast; one of
them, the first or the second, may be absent, then the attribute `other` takes its place, rounded to the dtype of the
array. `other` is a number, or in a graph a size such as `T`. Dimensions in attributes are not negative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from mvllm.extension_api.models import torch_dtype

Tensor = torch.Tensor
Shape = tuple[int, ...]


def add(x: Tensor | None, y: Tensor | None, *, other: float | None = None) -> Tensor:
    """x + y. The absent one, the first or the second, is `other`; so in all operations with `other`."""
    return torch.add(*_pair(x, y, other))


def sub(x: Tensor | None, y: Tensor | None, *, other: float | None = None) -> Tensor:
    """x - y; without x it is other - y."""
    return torch.sub(*_pair(x, y, other))


def mul(x: Tensor | None, y: Tensor | None, *, other: float | None = None) -> Tensor:
    """x · y."""
    return torch.mul(*_pair(x, y, other))


def div(x: Tensor | None, y: Tensor | None, *, other: float | None = None) -> Tensor:
    """x / y, of floats; without x it is other / y."""
    return torch.div(*_pair(x, y, other))


def floor_div(x: Tensor | None, y: Tensor | None, *, other: float | None = None) -> Tensor:
    """x / y rounded towards minus infinity."""
    return torch.div(*_pair(x, y, other), rounding_mode="floor")


def pow(x: Tensor | None, y: Tensor | None, *, other: float | None = None) -> Tensor:
    """x to the power y, of floats; without x it is other to the power y."""
    return torch.pow(*_pair(x, y, other))


def maximum(x: Tensor | None, y: Tensor | None, *, other: float | None = None) -> Tensor:
    """The larger element."""
    return torch.maximum(*_pair(x, y, other))


def minimum(x: Tensor | None, y: Tensor | None, *, other: float | None = None) -> Tensor:
    """The smaller element."""
    return torch.minimum(*_pair(x, y, other))


def eq(x: Tensor | None, y: Tensor | None, *, other: float | None = None) -> Tensor:
    """x == y, bool."""
    return torch.eq(*_pair(x, y, other))


def lt(x: Tensor | None, y: Tensor | None, *, other: float | None = None) -> Tensor:
    """x < y, bool; without x it is other < y."""
    return torch.lt(*_pair(x, y, other))


def le(x: Tensor | None, y: Tensor | None, *, other: float | None = None) -> Tensor:
    """x <= y, bool; without x it is other <= y."""
    return torch.le(*_pair(x, y, other))


def logical_and(x: Tensor, y: Tensor) -> Tensor:
    """x and y, of bool."""
    return torch.logical_and(x, y)


def logical_not(x: Tensor) -> Tensor:
    """not x, of bool."""
    return torch.logical_not(x)


def neg(x: Tensor) -> Tensor:
    """-x."""
    return torch.neg(x)


def exp(x: Tensor) -> Tensor:
    """e to the power x."""
    return torch.exp(x)


def log(x: Tensor) -> Tensor:
    """The natural logarithm."""
    return torch.log(x)


def sqrt(x: Tensor) -> Tensor:
    """The square root."""
    return torch.sqrt(x)


def rsqrt(x: Tensor) -> Tensor:
    """1 / sqrt(x)."""
    return torch.rsqrt(x)


def sin(x: Tensor) -> Tensor:
    """The sine."""
    return torch.sin(x)


def cos(x: Tensor) -> Tensor:
    """The cosine."""
    return torch.cos(x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)); x itself above 20."""
    return F.softplus(x)


def softmax(x: Tensor, *, dim: int) -> Tensor:
    """Softmax along a dimension, computed in float32."""
    return torch.softmax(x, dim)


def where(condition: Tensor, x: Tensor | None, y: Tensor | None, *, other: float | None = None) -> Tensor:
    """x where the condition holds, else y."""
    a, b = _pair(x, y, other)
    return torch.where(condition, a, b)


def clamp(x: Tensor, *, min: float | None, max: float | None) -> Tensor:
    """min and max as bounds; None for no bound."""
    return torch.clamp(x, min, max)


def sum(x: Tensor, *, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """The sum over the dimensions `dims`, in the dtype of x; with keepdim they stay with size 1."""
    return torch.sum(x, dims, keepdim)


def mean(x: Tensor, *, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """The mean over the dimensions `dims`, in the dtype of x; with keepdim they stay with size 1."""
    return torch.mean(x, dims, keepdim)


def max(x: Tensor, *, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """The largest element over the dimensions `dims`, without indices; with keepdim they stay with size 1."""
    return torch.amax(x, dims, keepdim)


def topk(x: Tensor, *, k: int, dim: int) -> tuple[Tensor, Tensor]:
    """The k largest elements along a dimension, the largest first, and their int64 indices; ties in any order."""
    return torch.topk(x, k, dim)


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """The matrix product of the last two dimensions; leading dimensions and dtypes are equal."""
    return torch.matmul(x, y)


def reshape(x: Tensor, *, shape: Shape) -> Tensor:
    """The same elements, in order, in another shape, which has no -1."""
    return x.reshape(shape)


def permute(x: Tensor, *, dims: tuple[int, ...]) -> Tensor:
    """Dimension i of the result is dimension dims[i] of x."""
    return x.permute(dims)


def expand(x: Tensor, *, shape: Shape) -> Tensor:
    """Repeats dimensions of size 1, and new leading ones, to a shape, which is the result's and has no -1."""
    return x.expand(shape)


def slice(x: Tensor, *, dim: int, start: int, stop: int, step: int) -> Tensor:
    """Elements start, start + step, ... before stop, of one dimension; all are in bounds, step > 0."""
    index = [torch.arange(start, stop, step)]
    return x.index_select(dim, index[0])


def cat(*parts: Tensor, dim: int) -> Tensor:
    """Concatenation of one or more inputs of one dtype along a dimension. The reference takes them one by one."""
    return torch.cat(parts, dim)


def index_select(x: Tensor, index: Tensor, *, dim: int) -> Tensor:
    """Rows of one dimension by index, int32 or int64 [n]."""
    return x.index_select(dim, index)


def gather(x: Tensor, index: Tensor, *, dim: int) -> Tensor:
    """result[i, j] = x[i, index[i, j]] for the last of two dimensions, and likewise for others; index is int64.

    The result has the shape of index, which has as many dimensions as x. In dimensions other than `dim` it may be
    smaller than x; the result then is that of the first elements of x.
    """
    return x.gather(dim, index)


def scatter(x: Tensor, index: Tensor, source: Tensor | None, *, dim: int, other: float | None = None) -> Tensor:
    """x with result[i, index[i, j]] = source[i, j] for the last of two dimensions, and likewise for others.

    The result has the shape of x; index is int64. In dimensions other than `dim`, index may be smaller than x; in every
    dimension it may be smaller than source. Elements that it does not name keep x. Without source each named element
    is `other`.
    """
    return x.scatter(dim, index, other) if source is None else x.scatter(dim, index, source)  # type: ignore[arg-type]


def cumsum(x: Tensor, *, dim: int) -> Tensor:
    """The cumulative sum along a dimension, in the dtype of x."""
    return torch.cumsum(x, dim, dtype=x.dtype)


def to_dtype(x: Tensor, *, dtype: str) -> Tensor:
    """Conversion; floats become integers by truncation."""
    return x.to(torch_dtype(dtype))


def full(*, shape: Shape, value: float, dtype: str) -> Tensor:
    """An array of one value."""
    return torch.full(shape, value, dtype=torch_dtype(dtype))


def arange(*, start: int, stop: int, step: int, dtype: str) -> Tensor:
    """start, start + step, ... before stop."""
    return torch.arange(start, stop, step, dtype=torch_dtype(dtype))


def _pair(x: Tensor | None, y: Tensor | None, other: float | None) -> tuple[Any, Any]:
    """Both operands; `other` as an array of the dtype of the one that is given."""
    if x is None:
        assert y is not None and other is not None, "one operand is an array"
        return torch.tensor(other, dtype=y.dtype), y
    if y is None:
        assert other is not None, "the second operand is an array or a number"
        return x, torch.tensor(other, dtype=x.dtype)
    return x, y


ARRAY_OPERATIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        add, sub, mul, div, floor_div, pow, maximum, minimum, eq, lt, le, logical_and, logical_not, neg, exp, log, sqrt,
        rsqrt, sin, cos, softplus, softmax, where, clamp, sum, mean, max, topk, matmul,
        reshape, permute, expand, slice, cat, index_select, gather, scatter, cumsum, to_dtype, full, arange,
    )
}  # fmt: skip
"""The definitions by name."""

"""Building blocks of the lowerings: an OpenVINO model that grows node by node, and sizes known only when it runs.

Real numbers are float32 in the model whatever a graph calls them: the plugin of the processor then computes in the
precision of `INFERENCE_PRECISION_HINT` where its kernels gain by it. Weights keep their type, and a conversion
follows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import openvino as ov
from openvino import Type
from openvino import opset15 as op

from mvllm_graph import Dim, Node, StepGraph, Value

REAL = ("float32", "bfloat16", "float16", "float64")
TYPES = {
    "bool": Type.boolean,
    "uint8": Type.u8,
    "int8": Type.i8,
    "int32": Type.i32,
    "int64": Type.i64,
    "float16": Type.f16,
    "bfloat16": Type.bf16,
    "float32": Type.f32,
    "float64": Type.f64,
}
"""OpenVINO's types of arrays that enter a model, by their names in a graph."""

Out = Any
"""An output of a node of the model (openvino.Output)."""


def computed_type(dtype: str) -> Type:
    """The type in which the model computes values of a graph's dtype."""
    return Type.f32 if dtype in REAL else TYPES[dtype]


def stored_type(dtype: str) -> Type:
    """The type in which values of a graph's dtype enter and leave the model."""
    return TYPES[dtype] if dtype in ("bfloat16", "float16") else computed_type(dtype)


def converted(x: Out, dtype: str) -> Out:
    """The output in the type in which the model computes values of a graph's dtype."""
    wanted = computed_type(dtype)
    return x if x.get_element_type() == wanted else op.convert(x, wanted).output(0)


def constant(value: Any, dtype: Type) -> Out:
    """A small constant."""
    return op.constant(value, dtype).output(0)


def integers(values: Sequence[int]) -> Out:
    """A constant int64 vector."""
    return constant(np.array(values, np.int64), Type.i64)


def array_constant(array: np.ndarray, dtype: str) -> Out:
    """A constant in the memory of `array`, which must outlive the model; bits of 16-bit floats are given their type."""
    array = np.ascontiguousarray(array)
    if dtype in ("bfloat16", "float16"):
        tensor = ov.Tensor(array.view(np.uint16), ov.Shape(array.shape), TYPES[dtype])
        return op.constant(tensor, shared_memory=True).output(0)
    return op.constant(array, shared_memory=True).output(0)


class Building:
    """One OpenVINO model in the making.

    Attributes:
        graph: The step graph.
        arrays: Weights and constants, by name.
        outputs: The model's output for each value of the graph.
        caches: Parameters of caches, by the name of the cache, keys first.
        shared: What lowerings computed once for several nodes.
    """

    def __init__(self, graph: StepGraph, arrays: Mapping[str, np.ndarray]) -> None:
        self.graph = graph
        self.arrays = arrays
        self.outputs: dict[str, Out] = {}
        self.caches: dict[str, tuple[Any, ...]] = {}
        self.parameters: list[Any] = []
        self.shared: dict[Any, Any] = {}
        self.values: dict[str, Value] = {value.name: value for value in graph.inputs}
        self.kept: list[np.ndarray] = []
        for node in graph.nodes:
            self.values.update({value.name: value for value in node.outputs})

    def parameter(self, name: str, shape: Sequence[int], dtype: Type) -> Any:
        """An input of the model; -1 is a size that may change."""
        made = op.parameter(ov.PartialShape(list(shape)), dtype, name=name)
        made.output(0).set_names({name})
        self.parameters.append(made)
        return made

    def output(self, name: str) -> Out:
        """The model's output for a value of the graph; weights become constants when they are first used."""
        if name not in self.outputs:
            self.outputs[name] = self._entering(self.values[name])
        return self.outputs[name]

    def _entering(self, value: Value) -> Out:
        if value.kind in ("weight", "constant"):
            made = array_constant(self.arrays[value.name], value.dtype)
            made = converted(made, value.dtype)
            if value.dtype in ("bfloat16", "float16"):
                # With this mark, which OpenVINO's own converters set, the weight is not unpacked to float32.
                made.get_node().get_rt_info()["decompression_0"] = ""
            return made
        shape = [dim if isinstance(dim, int) else -1 for dim in value.shape]
        return converted(self.parameter(value.name, shape, stored_type(value.dtype)).output(0), value.dtype)

    def result(self, value: Value) -> Any:
        """A result of the model, in its own type: before one in float32 the plugin would compute sums in float32."""
        x, wanted = self.output(value.name), stored_type(value.dtype)
        return op.result(x if x.get_element_type() == wanted else op.convert(x, wanted))

    def keep(self, array: np.ndarray) -> np.ndarray:
        """Keeps an array alive as long as the model."""
        self.kept.append(array)
        return array

    def inputs(self, node: Node) -> list[Out]:
        """The model's outputs for the inputs of a node; None for those that are absent."""
        return [None if name is None else self.output(name) for name in node.inputs]

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """The result of `make()`, made only once for each key."""
        if key not in self.shared:
            self.shared[key] = make()
        return self.shared[key]

    # ------------------------------------------------------------------------------------------------------------ sizes

    def size(self, dim: Dim) -> Out:
        """A size as an int64 vector of one element."""
        if isinstance(dim, int):
            return integers([dim])
        return self.once(("size", dim), lambda: self._symbolic_size(dim))

    def _symbolic_size(self, dim: str) -> Out:
        factor, symbol, addend = affine(dim)
        size = self.once(("symbol", symbol), lambda: self._symbol(symbol))
        if factor != 1:
            size = op.multiply(size, integers([factor])).output(0)
        return op.add(size, integers([addend])).output(0) if addend else size

    def _symbol(self, symbol: str) -> Out:
        """The size that a symbol stands for, read from an input whose shape contains it."""
        for value in self.graph.inputs:
            for axis, dim in enumerate(value.shape):
                if isinstance(dim, str) and affine(dim)[1] == symbol and affine(dim)[0] == 1:
                    shape = op.shape_of(self.output(value.name), Type.i64)
                    size = op.gather(shape, integers([axis]), constant(0, Type.i64)).output(0)
                    addend = affine(dim)[2]
                    return op.subtract(size, integers([addend])).output(0) if addend else size
        raise ValueError(f"No input of the graph {self.graph.name!r} has the size {symbol!r}.")

    def sizes(self, dims: Sequence[Dim]) -> Out:
        """A shape as an int64 vector."""
        if all(isinstance(dim, int) for dim in dims):
            return integers([int(dim) for dim in dims])
        return op.concat([self.size(dim) for dim in dims], 0).output(0)

    def reshape(self, x: Out, dims: Sequence[Dim]) -> Out:
        """`x` with another shape; one size that is not known yet costs nothing."""
        if sum(isinstance(dim, str) for dim in dims) <= 1 and 0 not in dims:
            wanted = integers([dim if isinstance(dim, int) else -1 for dim in dims])
        else:
            wanted = self.sizes(dims)
        return op.reshape(x, wanted, False).output(0)


_EXPRESSION = re.compile(r"(?:(\d+)\*)?([A-Z])([+-]\d+)?")


def is_symbolic(entry: object) -> bool:
    """Whether an entry of a shape or an attribute is a size that is known only when the model runs."""
    return isinstance(entry, str) and _EXPRESSION.fullmatch(entry) is not None


def affine(dim: str) -> tuple[int, str, int]:
    """(factor, symbol, addend) of a size such as "T", "R+1" or "8*T"."""
    match = _EXPRESSION.fullmatch(dim)
    if match is None:
        raise ValueError(f"{dim!r} is not an expression of one symbol.")
    return int(match[1] or 1), match[2], int(match[3] or 0)


Lowering = Callable[[Building, Node], Sequence[Out]]
"""Adds the operations of one node to the model; returns the outputs of its results."""

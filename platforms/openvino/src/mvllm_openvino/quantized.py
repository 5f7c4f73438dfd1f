"""Integer weights as compressed constants: OpenVINO multiplies by them without a copy in float32.

    integers [rows, columns] ── convert ── subtract zero points ── multiply scales ──> weight

With groups of columns the constants are [rows, groups, group_size], and the product is reshaped.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import openvino as ov
from openvino import Type
from openvino import opset15 as op

from mvllm_graph import Node, StepGraph, Value
from mvllm_openvino.building import Building, Out, array_constant, integers


def names_of_pairs(graphs: Iterable[StepGraph]) -> set[str]:
    """Weights whose integers have 4 bits and are kept two to a byte."""
    found = set()
    for graph in graphs:
        values = graph.values()
        for node in graph.nodes:
            if node.op == "quantized_linear" and _has_pairs(node, values[str(node.inputs[1])]):
                found.add(str(node.inputs[1]))
    return found


def pairs(array: np.ndarray) -> np.ndarray:
    """Integers of 4 bits, two to a byte, the first in the low half: uint8 [elements / 2]."""
    each = np.ascontiguousarray(array).view(np.uint8).reshape(-1, 2) & 15
    return each[:, 0] | each[:, 1] << 4


def _has_pairs(node: Node, values: Value) -> bool:
    columns = int(values.shape[1])
    return (
        node.attributes["weight.bits"] == 4 and columns % 2 == 0 and columns % node.attributes["weight.group_size"] == 0
    )


def quantized_weight(building: Building, node: Node) -> Out:
    """The dequantised weight of a `quantized_linear`, [rows, columns]; the processor's plugin keeps it compressed."""
    names = [str(name) for name in node.inputs[1:-1] if name is not None]
    values, scales = building.arrays[names[0]], building.arrays[names[1]]
    zero_points = building.arrays[names[2]] if len(names) > 2 else None
    group_size = int(node.attributes["weight.group_size"])
    rows, columns = (int(size) for size in building.values[names[0]].shape)
    if columns % group_size:  # the last group is shorter: give every column its scale
        full = np.repeat(scales, group_size, axis=1)[:, :columns]
        zeros = None if zero_points is None else np.repeat(zero_points, group_size, axis=1)[:, :columns]
        weight = (values.astype(np.float32) - (0 if zeros is None else zeros.astype(np.float32))) * full
        return array_constant(building.keep(weight.astype(np.float32)), "float32")
    groups = columns // group_size
    shape = (rows, groups, group_size) if groups > 1 else (rows, columns)
    params = (rows, groups, 1) if groups > 1 else (rows, 1)
    if _has_pairs(node, building.values[names[0]]):
        stored = op.constant(ov.Tensor(values, ov.Shape(shape), Type.i4), shared_memory=True).output(0)
    else:
        stored = array_constant(values.reshape(shape), "int8")
    weight = op.convert(stored, Type.f32).output(0)
    if zero_points is not None:
        zeros = op.convert(array_constant(zero_points.reshape(params), "int8"), Type.f32)
        weight = op.subtract(weight, zeros).output(0)
    scale = array_constant(building.keep(np.ascontiguousarray(scales.reshape(params), np.float32)), "float32")
    weight = op.multiply(weight, scale).output(0)
    return op.reshape(weight, integers([rows, columns]), False).output(0) if groups > 1 else weight

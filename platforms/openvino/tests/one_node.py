"""Graphs of one operation, run through OpenVINO, and the results of the operation's definition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mvllm_graph import GRAPH_OPERATIONS, Node, StepGraph, StepSizes, Value, substitute
from mvllm_openvino.compiler import OpenVINOCompiler

T = 5
"""Tokens of each case: a first dimension of this size is symbolic."""


class Weight:
    """An argument that is a weight of the graph."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def run(op: str, *arguments: Any, attributes: Mapping[str, Any] | None = None) -> list[np.ndarray]:
    """Results of the operation through OpenVINO."""
    given = attributes or {}
    results = [torch.as_tensor(result) for result in expected(op, *arguments, attributes=given)]
    values, names, weights, step = [Value("tokens", "step", ("T",), "int32")], [], {}, {"tokens": np.zeros(T, np.int32)}
    for i, argument in enumerate(arguments):
        if argument is None:
            names.append(None)
            continue
        is_weight = isinstance(argument, Weight)
        tensor = argument.tensor if is_weight else argument
        kind, holder = ("weight", weights) if is_weight else ("step", step)
        values.append(Value(f"x{i}", kind, tuple(tensor.shape) if is_weight else shape(tensor), dtype(tensor)))
        holder[f"x{i}"] = tensor.numpy()
        names.append(f"x{i}")
    outputs = tuple(Value(f"r{i}", "result", shape(result), dtype(result)) for i, result in enumerate(results))
    graph = StepGraph(
        "model", tuple(values), (Node(op, tuple(names), outputs, given),), tuple(output.name for output in outputs)
    )
    program = OpenVINOCompiler().program([graph])
    for name, array in weights.items():
        program.set_weight(name, array)
    program.finish_weights()
    return [program.to_host(array) for array in program.run("model", step, StepSizes(T, 1, 1, 1, T, T))]


def expected(op: str, *arguments: Any, attributes: Mapping[str, Any] | None = None) -> Sequence[torch.Tensor]:
    """Results of the operation's definition."""
    reference = GRAPH_OPERATIONS[op].reference
    assert reference is not None
    plain = [argument.tensor if isinstance(argument, Weight) else argument for argument in arguments]
    found = reference(*plain, **{name: _number(entry) for name, entry in (attributes or {}).items()})
    return found if isinstance(found, tuple | list) else (found,)


def check(op: str, *arguments: Any, attributes: Mapping[str, Any] | None = None) -> None:
    """Asserts that both are equal, up to roundings."""
    for found, wanted in zip(
        run(op, *arguments, attributes=attributes), expected(op, *arguments, attributes=attributes), strict=True
    ):
        assert found.dtype == wanted.numpy().dtype and found.shape == tuple(wanted.shape)
        np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-4, atol=1e-4)


def shape(tensor: torch.Tensor) -> tuple[int | str, ...]:
    """The shape, with a symbolic first size where it is that of tokens."""
    return tuple("T" if i == 0 and size == T else size for i, size in enumerate(tensor.shape))


def dtype(tensor: torch.Tensor) -> str:
    """Name of the dtype."""
    return str(tensor.dtype).removeprefix("torch.")


def _number(entry: Any) -> Any:
    if isinstance(entry, tuple):
        return tuple(_number(each) for each in entry)
    return substitute(entry, {"T": T}) if isinstance(entry, str) and "T" in entry else entry

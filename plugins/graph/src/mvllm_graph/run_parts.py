"""Runs the parts of a graph, and the collectives between them."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import numpy as np
import torch

from mvllm.extension_api.worker import GroupCoordinator
from mvllm.plugin_api import GraphProgram, Node, StepSizes
from mvllm_graph.arrays import to_numpy, to_torch
from mvllm_graph.parts import CutGraph

Collectives = Generator[tuple[Node, np.ndarray], np.ndarray, list[np.ndarray]]
"""Yields each collective with its input, is sent its result, and returns the results of the graph."""


def run_graph(
    cut: CutGraph,
    program: GraphProgram,
    inputs: Mapping[str, Any],
    sizes: StepSizes,
    group: GroupCoordinator | None = None,
    *,
    to_host: bool = True,
) -> list[Any]:
    """Runs a whole graph.

    Args:
        cut: The graph.
        program: Its program.
        inputs: Step inputs by name; those that no part reads are ignored.
        sizes: Sizes of the step.
        group: The tensor-parallel ranks, for host tensors; needed if the graph has several parts.
        to_host: Copy the results to the host.

    Returns:
        The results: arrays of the host, or else inputs for another graph of the program.
    """
    if not cut.has_collectives:
        part = cut.parts[0]
        assert part.graph is not None
        results = program.run(part.graph.name, {name: inputs[name] for name in part.step_inputs}, sizes)
        return [program.to_host(array) for array in results] if to_host else list(results)
    parts = run_parts(cut, program, inputs, sizes)
    try:
        node, array = next(parts)
        while True:
            assert group is not None, "a graph with collectives is that of one of several ranks"
            node, array = parts.send(_over_ranks(node, array, group))
    except StopIteration as end:
        return list(end.value)


def run_parts(cut: CutGraph, program: GraphProgram, inputs: Mapping[str, Any], sizes: StepSizes) -> Collectives:
    """Runs the parts of a graph one after the other, and has the caller compute the collectives between them.

    Args:
        cut, program, inputs, sizes: As for `run_graph`.
    """
    arrays = dict(inputs)
    on_host: set[str] = set()

    def host_array(name: str) -> np.ndarray:
        array: np.ndarray = arrays[name] if name in on_host else program.to_host(arrays[name])
        return array

    for part in cut.parts:
        if part.graph is not None:
            given = {name: arrays[name] for name in part.step_inputs}
            arrays.update(zip(part.graph.outputs, program.run(part.graph.name, given, sizes), strict=True))
        for node in part.collectives:
            (name,) = node.inputs
            assert name is not None, "a collective has an input"
            arrays[node.outputs[0].name] = yield node, host_array(name)
            on_host.add(node.outputs[0].name)
        if part.collectives:  # what is not read any more is freed
            arrays = {name: array for name, array in arrays.items() if name in part.needed}
    return [host_array(value.name) for value in cut.outputs]


def _over_ranks(node: Node, array: np.ndarray, group: GroupCoordinator) -> np.ndarray:
    """The result of a collective on one host array."""
    tensor: torch.Tensor = to_torch(array if array.flags.writeable else array.copy(), node.outputs[0].dtype)
    if node.op == "all_reduce":
        return to_numpy(group.all_reduce(tensor))
    return to_numpy(group.all_gather(tensor, dim=node.attributes["dim"]))

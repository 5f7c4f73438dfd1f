"""Runs the parts of a graph, and the collectives between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from mvllm.distributed.group_coordinator import GroupCoordinator
from mvllm.graph.arrays import to_numpy, to_torch
from mvllm.graph.parts import CutGraph
from mvllm.platform.graph_compiler import GraphProgram
from mvllm.platform.step_graph import Node, StepSizes


def run_graph(
    cut: CutGraph,
    program: GraphProgram,
    inputs: Mapping[str, Any],
    sizes: StepSizes,
    group: GroupCoordinator | None = None,
) -> list[np.ndarray]:
    """Runs a whole graph.

    Args:
        cut: The graph.
        program: Its program.
        inputs: Step inputs by name; those that no part reads are ignored.
        sizes: Sizes of the step.
        group: The tensor-parallel ranks, for host tensors; needed if the graph has several parts.

    Returns:
        The results, on the host.
    """
    arrays = dict(inputs)
    on_host: set[str] = set()
    for part in cut.parts:
        if part.graph is not None:
            given = {value.name: arrays[value.name] for value in part.graph.inputs_of("step")}
            arrays.update(zip(part.graph.outputs, program.run(part.graph.name, given, sizes), strict=True))
        for node in part.collectives:
            (name,) = node.inputs
            assert name is not None and group is not None, "a collective has an input and a group"
            array = arrays[name] if name in on_host else program.to_host(arrays[name])
            arrays[node.outputs[0].name] = _over_ranks(node, array, group)
            on_host.add(node.outputs[0].name)
        if part.collectives:  # what is not read any more is freed
            arrays = {name: array for name, array in arrays.items() if name in part.needed}
    results = [value.name for value in cut.outputs]
    return [arrays[name] if name in on_host else program.to_host(arrays[name]) for name in results]


def _over_ranks(node: Node, array: np.ndarray, group: GroupCoordinator) -> np.ndarray:
    """The result of a collective on one host array."""
    tensor: torch.Tensor = to_torch(array if array.flags.writeable else array.copy(), node.outputs[0].dtype)
    if node.op == "all_reduce":
        return to_numpy(group.all_reduce(tensor))
    return to_numpy(group.all_gather(tensor, dim=node.attributes["dim"]))

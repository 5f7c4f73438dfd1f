"""A graph compiler without torch: linear maps in NumPy, one of which kills its own process on request."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from mvllm.plugin_api import KVLayout
from mvllm_graph import CacheValue, GraphCompiler, GraphProgram, Node, StepGraph, StepSizes, Value

KILLED_BY = -1.0
"""A program whose weight starts with this value kills its process while it runs."""


class NumpyCompiler(GraphCompiler):
    """Runs graphs of one linear map."""

    def operations(self) -> Collection[str]:
        return {"linear"}

    def program(self, graphs: Sequence[StepGraph]) -> GraphProgram:
        return NumpyProgram()


class NumpyProgram(GraphProgram):
    """x · weightᵀ."""

    _weight: np.ndarray

    def set_weight(self, name: str, array: np.ndarray) -> None:
        self._weight = array.copy()

    def finish_weights(self) -> None:
        pass

    def kv_layout(self, cache: CacheValue) -> KVLayout:
        raise AssertionError("there is no attention")

    def allocate_caches(self, num_blocks: int, block_size: int) -> None:
        raise MemoryError(f"{num_blocks} blocks")

    def free_caches(self) -> None:
        pass

    def run(self, graph: str, inputs: Mapping[str, Any], sizes: StepSizes) -> Sequence[np.ndarray]:
        if self._weight[0, 0] == KILLED_BY:
            os.kill(os.getpid(), signal.SIGKILL)
        return [inputs["x"] @ self._weight.T]

    def to_host(self, array: np.ndarray) -> np.ndarray:
        return array


def linear_graph(columns: int = 4) -> StepGraph:
    """[T, columns] to [T, 3]."""
    x, weight = Value("x", "step", ("T", columns), "float32"), Value("w", "weight", (3, columns), "float32")
    node = Node("linear", ("x", "w", None), (Value("y", "result", ("T", 3), "float32"),))
    return StepGraph("model", (x, weight), (node,), ("y",))

"""GraphProgram of the MLX platform: compiled functions of a model's graphs, its weights and KV caches.

On the GPU a function is compiled for each combination of sizes. On the processor it is called as it is: there
`mx.compile` starts a C++ compiler for each group of operations that it fuses, which takes seconds for each combination.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mvllm.plugin_api import KVLayout, PlatformError
from mvllm.plugin_api.graph import CacheValue, DeviceArray, GraphProgram, StepGraph, StepSizes
from mvllm_mlx.attention import AttentionStep, cache_shapes
from mvllm_mlx.lowering import DTYPES, Lowering, Run, require_memory, to_mlx, to_numpy

BLOCK_SIZES = (16, 32, 8)
"""Tokens per block of the KV cache, the preferred number first."""

_ATTENTION_INPUTS = ("block_table.0", "slot_mapping.0", "query_start_loc", "seq_lens")

Caches = dict[str, list[Any]]


class MLXProgram(GraphProgram):
    """The graphs of one model as functions, one for each combination of sizes."""

    def __init__(self, graphs: Sequence[StepGraph], table: Mapping[str, Lowering]) -> None:
        self._graphs = {graph.name: graph for graph in graphs}
        self._table = table
        values = {value.name: value for graph in graphs for value in graph.inputs}
        self._values = values
        self._cache_values = {name: value for name, value in values.items() if isinstance(value, CacheValue)}
        self._weights: dict[str, Any] = {}
        self._caches: Caches = {}
        self._num_blocks = 0
        self._compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def set_weight(self, name: str, array: np.ndarray) -> None:
        require_memory(array.nbytes, f"The weight {name} does not fit")
        self._weights[name] = to_mlx(array, self._values[name].dtype)
        mx.eval(self._weights[name])

    def finish_weights(self) -> None:
        """Nothing to do: functions are compiled when they first run."""

    def kv_layout(self, cache: CacheValue) -> KVLayout:
        elements = sum(shape[2] * shape[3] for shape in cache_shapes(cache.spec, 1, 1))
        return KVLayout(BLOCK_SIZES, elements * DTYPES[cache.spec.kv_dtype].size)

    def allocate_caches(self, num_blocks: int, block_size: int) -> None:
        self._caches = {}
        mx.clear_cache()
        tokens = num_blocks * block_size
        size = tokens * sum(self.kv_layout(cache).bytes_per_token for cache in self._cache_values.values())
        require_memory(size, f"{num_blocks} blocks of the KV cache do not fit")
        for name, cache in self._cache_values.items():
            shapes = cache_shapes(cache.spec, num_blocks, block_size)
            self._caches[name] = [mx.zeros(shape, dtype=DTYPES[cache.spec.kv_dtype]) for shape in shapes]
            mx.eval(self._caches[name])
        self._num_blocks = num_blocks

    def free_caches(self) -> None:
        self._caches = {}
        mx.clear_cache()

    def run(
        self, graph: str, inputs: Mapping[str, np.ndarray | DeviceArray], sizes: StepSizes
    ) -> Sequence[DeviceArray]:
        step_graph = self._graphs[graph]
        caches = [value.name for value in step_graph.inputs_of("cache")]
        if missing := [name for name in caches if name not in self._caches]:
            raise PlatformError(f"The graph {graph!r} ran before {missing[0]!r} was allocated.")
        steps = [value for value in step_graph.inputs_of("step") if not caches or value.name not in _ATTENTION_INPUTS]
        arrays = [_on_device(inputs[value.name], value.dtype) for value in steps]
        attention = AttentionStep.of(inputs, self._num_blocks) if caches else None
        structure = None if attention is None else attention.structure
        key = (graph, tuple(sizes.symbols().items()), structure)
        if key not in self._compiled:
            function = self._function(step_graph, sizes, attention)
            self._compiled[key] = mx.compile(function) if mx.default_device() == mx.gpu else function
        weights = [self._weights[value.name] for value in step_graph.inputs_of("weight", "constant")]
        indices = [] if attention is None else [mx.array(array) for array in attention.flat()]
        stored = [self._caches[name] for name in caches]
        results, updated = self._compiled[key](arrays, indices, weights, stored)
        # Nothing else may refer to the caches now, so that MLX writes to them in place.
        self._caches.update(zip(caches, updated, strict=True))
        del stored
        mx.eval(results, updated)
        return results

    def _function(
        self, graph: StepGraph, sizes: StepSizes, attention: AttentionStep | None
    ) -> Callable[..., tuple[list[Any], list[Any]]]:
        """The function of a graph for certain sizes: its results and the new contents of the caches."""
        caches = [value.name for value in graph.inputs_of("cache")]
        weights = [value.name for value in graph.inputs_of("weight", "constant")]
        steps = [
            value.name for value in graph.inputs_of("step") if attention is None or value.name not in _ATTENTION_INPUTS
        ]
        symbols = sizes.symbols()

        def function(
            arrays: list[Any], indices: list[Any], of_weights: list[Any], stored: list[list[Any]]
        ) -> tuple[list[Any], list[Any]]:
            values = dict(zip([*steps, *weights, *caches], [*arrays, *of_weights, *stored], strict=True))
            run = Run(values, symbols, None if attention is None else attention.with_arrays(indices))
            values.update({name: None for name in _ATTENTION_INPUTS if attention is not None})
            for node in graph.nodes:
                made = self._table[node.op](run, node)
                values.update({value.name: array for value, array in zip(node.outputs, made, strict=True)})
            return [values[name] for name in graph.outputs], [values[name] for name in caches]

        return function

    def to_host(self, array: DeviceArray) -> np.ndarray:
        return to_numpy(array)

    def kv_bytes(self, cache: CacheValue) -> int:
        return sum(array.nbytes for array in self._caches[cache.name])

    def fill(self, cache: CacheValue, value: float) -> None:
        self._caches[cache.name] = [mx.full(x.shape, value, dtype=x.dtype) for x in self._caches[cache.name]]

    def read_slots(self, cache: CacheValue, slots: np.ndarray) -> Sequence[np.ndarray]:
        index = mx.array(slots)
        return [to_numpy(x.reshape(-1, *x.shape[2:])[index]) for x in self._caches[cache.name]]

    def close(self) -> None:
        self._compiled.clear()
        self._weights.clear()
        self.free_caches()


def _on_device(array: np.ndarray | DeviceArray, dtype: str) -> Any:
    return array if isinstance(array, mx.array) else to_mlx(array, dtype)

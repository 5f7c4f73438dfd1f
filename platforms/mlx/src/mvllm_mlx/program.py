"""GraphProgram of the MLX platform: compiled functions of a model's graphs, its weights and KV caches.

On the GPU a function is compiled for each combination of sizes. On the processor it is called as it is: there
`mx.compile` starts a C++ compiler for each group of operations that it fuses, which takes seconds for each combination.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mvllm.plugin_api import KVLayout, PlatformError
from mvllm_graph import CacheValue, DeviceArray, GraphProgram, StateValue, StepGraph, StepSizes
from mvllm_mlx.attention import AttentionStep, cache_shapes
from mvllm_mlx.lowering import DTYPES, Lowering, Run, require_memory, to_mlx, to_numpy
from mvllm_mlx.states import StateStep

BLOCK_SIZES = (16, 32, 8)
"""Tokens per block of the KV cache, the preferred number first."""

_INDICES = ("block_table.0", "slot_mapping.0", "query_start_loc", "seq_lens", "read_slots", "write_slots")
"""Step inputs that attention and states read as AttentionStep and StateStep."""

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
        self._state_values = {name: value for name, value in values.items() if isinstance(value, StateValue)}
        self._states: dict[str, Any] = {}
        self._num_blocks = self._num_slots = 0
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

    def allocate_states(self, num_slots: int) -> None:
        self._states = {}
        tensors = {name: value.tensor for name, value in self._state_values.items()}
        size = sum(math.prod(tensor.shape) * DTYPES[tensor.dtype].size for tensor in tensors.values())
        require_memory((num_slots + 1) * size, f"The states of {num_slots} sequences do not fit")
        self._states = {
            name: mx.zeros((num_slots + 1, *tensor.shape), dtype=DTYPES[tensor.dtype])
            for name, tensor in tensors.items()
        }
        mx.eval(self._states)
        self._num_slots = num_slots

    def free_caches(self) -> None:
        self._caches, self._states = {}, {}
        mx.clear_cache()

    def run(
        self, graph: str, inputs: Mapping[str, np.ndarray | DeviceArray], sizes: StepSizes
    ) -> Sequence[DeviceArray]:
        step_graph = self._graphs[graph]
        caches, states = ([value.name for value in step_graph.inputs_of(kind)] for kind in ("cache", "state"))
        if missing := [name for name in (*caches, *states) if name not in self._caches and name not in self._states]:
            raise PlatformError(f"The graph {graph!r} ran before {missing[0]!r} was allocated.")
        arrays = [_on_device(inputs[value.name], value.dtype) for value in _direct_inputs(step_graph)]
        attention = AttentionStep.of(inputs, self._num_blocks) if caches else None
        of_states = StateStep.of(inputs, sizes.tokens, self._num_slots) if states else None
        structure = attention and attention.structure, of_states and len(of_states.parts)
        key = (graph, tuple(sizes.symbols().items()), structure)
        if key not in self._compiled:
            function = self._function(step_graph, sizes, attention, of_states)
            self._compiled[key] = mx.compile(function) if mx.default_device() == mx.gpu else function
        weights = [self._weights[value.name] for value in step_graph.inputs_of("weight", "constant")]
        indices = [[] if step is None else [mx.array(a) for a in step.flat()] for step in (attention, of_states)]
        stored = [*(self._caches[name] for name in caches), *(self._states[name] for name in states)]
        results, updated = self._compiled[key](arrays, indices, weights, stored)
        # Nothing else may refer to caches and states now, so that MLX writes to them in place.
        self._caches.update(zip(caches, updated[: len(caches)], strict=True))
        self._states.update(zip(states, updated[len(caches) :], strict=True))
        del stored
        mx.eval(results, updated)
        return results

    def _function(
        self, graph: StepGraph, sizes: StepSizes, attention: AttentionStep | None, states: StateStep | None
    ) -> Callable[..., tuple[list[Any], list[Any]]]:
        """The function of a graph for certain sizes: its results and the new contents of caches and states."""
        memories = [value.name for kind in ("cache", "state") for value in graph.inputs_of(kind)]
        weights = [value.name for value in graph.inputs_of("weight", "constant")]
        steps = [value.name for value in _direct_inputs(graph)]
        symbols = sizes.symbols()

        def function(
            arrays: list[Any], indices: list[list[Any]], of_weights: list[Any], stored: list[Any]
        ) -> tuple[list[Any], list[Any]]:
            values = dict(zip([*steps, *weights, *memories], [*arrays, *of_weights, *stored], strict=True))
            run = Run(values, symbols)
            if attention is not None:
                run.attention = attention.with_arrays(indices[0])
            if states is not None:
                run.states = states.with_arrays(indices[1])
            values.update({name: None for name in _INDICES if name not in values})
            for node in graph.nodes:
                made = self._table[node.op](run, node)
                values.update({value.name: array for value, array in zip(node.outputs, made, strict=True)})
            return [values[name] for name in graph.outputs], [values[name] for name in memories]

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

    def read_state(self, state: StateValue) -> np.ndarray:
        return to_numpy(self._states[state.name])

    def write_state(self, state: StateValue, array: np.ndarray) -> None:
        self._states[state.name] = to_mlx(array, state.tensor.dtype)

    def block_format(self, cache: CacheValue) -> str:
        parts = "; ".join(f"{x.dtype}{list(x.shape[1:])}" for x in self._caches[cache.name])
        kind = "values in keys" if cache.spec.values_in_keys else "keys and values"
        return f"mvllm_mlx blocks of {kind}, {cache.spec.kv_dtype}: {parts}"

    def export_blocks(self, cache: CacheValue, blocks: np.ndarray, out: np.ndarray) -> None:
        start = 0
        for x in self._caches[cache.name]:
            rows = np.ascontiguousarray(to_numpy(x[mx.array(blocks)])).reshape(len(blocks), -1).view(np.uint8)
            out[:, start : start + rows.shape[1]] = rows
            start += rows.shape[1]

    def import_blocks(self, cache: CacheValue, blocks: np.ndarray, data: np.ndarray) -> None:
        start = 0
        for x in self._caches[cache.name]:
            size = x.nbytes // x.shape[0]
            rows = np.ascontiguousarray(data[:, start : start + size]).view(to_numpy(x[:1]).dtype)
            rows = rows.reshape(-1, *x.shape[1:])
            x[mx.array(blocks)] = to_mlx(rows, cache.spec.kv_dtype)
            start += size

    def export_slots(self, state: StateValue, slots: np.ndarray, out: np.ndarray) -> None:
        rows = np.ascontiguousarray(to_numpy(self._states[state.name][mx.array(slots)]))
        out[:] = rows.reshape(len(slots), -1).view(np.uint8)

    def import_slots(self, state: StateValue, slots: np.ndarray, data: np.ndarray) -> None:
        states = self._states[state.name]
        rows = data.view(to_numpy(states[:1]).dtype).reshape(-1, *state.tensor.shape)
        states[mx.array(slots)] = to_mlx(rows, state.tensor.dtype)

    def close(self) -> None:
        self._compiled.clear()
        self._weights.clear()
        self.free_caches()


def _direct_inputs(graph: StepGraph) -> list[Any]:
    """The step inputs that nodes read as arrays."""
    has_indices = bool(graph.inputs_of("cache", "state"))
    return [value for value in graph.inputs_of("step") if not (has_indices and value.name in _INDICES)]


def _on_device(array: np.ndarray | DeviceArray, dtype: str) -> Any:
    return array if isinstance(array, mx.array) else to_mlx(array, dtype)

"""Interpreter: a GraphCompiler that runs the definition of every operation in torch, node by node, on the host.

It is the oracle of graph compilers, and an example of one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mvllm.extension_api.contract import substitute
from mvllm.plugin_api import (
    AttentionSpec,
    BatchLayout,
    BlockTransfer,
    CacheValue,
    GraphCompiler,
    GraphProgram,
    KVCache,
    KVLayout,
    Node,
    PlatformError,
    ReferenceAttention,
    StateBackend,
    StateSpec,
    StateValue,
    StepGraph,
    StepSizes,
    Value,
)
from mvllm_graph.arguments import unflatten
from mvllm_graph.arrays import to_numpy, to_torch
from mvllm_graph.operations import GRAPH_OPERATIONS, PAGED_ATTENTION, PAGED_ATTENTION_INPUTS
from mvllm_graph.parts import distinct_inputs

_HOST = torch.from_numpy(np.empty(0)).device


class Interpreter(GraphCompiler):
    """Runs StepGraphs with the references of core.

    Args:
        optional: Optional operations that it names, which then occur in graphs.
        without: Operations that it does not name, so that core traces their definitions.
    """

    def __init__(self, optional: Collection[str] = (), without: Collection[str] = ()) -> None:
        self._operations = frozenset(
            op.name
            for op in GRAPH_OPERATIONS.values()
            if (op.group not in ("optional", "collective") or op.name in optional) and op.name not in without
        )

    def operations(self) -> Collection[str]:
        return self._operations

    def unsupported(self, graph: StepGraph) -> list[str]:
        reasons = super().unsupported(graph)
        for node in graph.nodes:
            if node.op == PAGED_ATTENTION:
                reasons += ReferenceAttention.validate(AttentionSpec(**node.attributes))
        return list(dict.fromkeys(reasons))

    def program(self, graphs: Sequence[StepGraph]) -> GraphProgram:
        return InterpretedProgram(graphs)


class InterpretedProgram(GraphProgram):
    """Graphs, their weights, caches and states as torch tensors on the host.

    Args:
        graphs: The graphs.
    """

    def __init__(self, graphs: Sequence[StepGraph]) -> None:
        self._graphs = {graph.name: graph for graph in graphs}
        self._weights = distinct_inputs(graphs, "weight", "constant")
        values = [*distinct_inputs(graphs, "cache", "state").values()]
        self._cache_values = [value for value in values if isinstance(value, CacheValue)]
        self._state_values = [value for value in values if isinstance(value, StateValue)]
        self._arrays: dict[str, torch.Tensor] = {}
        self._caches: dict[str, KVCache] = {}
        self._states: dict[str, torch.Tensor] = {}
        self._block_size = 0

    def set_weight(self, name: str, array: np.ndarray) -> None:
        self._arrays[name] = to_torch(array, self._weights[name].dtype).clone()

    def finish_weights(self) -> None:
        if missing := [name for name in self._weights if name not in self._arrays]:
            raise PlatformError(f"The program has no array for {', '.join(missing)}.")

    def kv_layout(self, cache: CacheValue) -> KVLayout:
        return ReferenceAttention(cache.spec).kv_layout()

    def allocate_caches(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._caches = {
            cache.name: ReferenceAttention(cache.spec).allocate(num_blocks, block_size, _HOST)
            for cache in self._cache_values
        }

    def allocate_states(self, num_slots: int) -> None:
        self._states = {
            state.name: torch.zeros((num_slots + 1, *state.tensor.shape), dtype=state.tensor.torch_dtype)
            for state in self._state_values
        }

    def free_caches(self) -> None:
        self._caches, self._states = {}, {}

    def run(self, graph: str, inputs: Mapping[str, Any], sizes: StepSizes) -> Sequence[torch.Tensor]:
        run = _Run(self._graphs[graph], sizes, self._block_size)
        run.arrays.update(self._arrays)
        run.caches, run.states = self._caches, self._states
        for value in self._graphs[graph].inputs_of("step"):
            given = inputs[value.name]
            run.arrays[value.name] = given if isinstance(given, torch.Tensor) else to_torch(given, value.dtype)
        with torch.no_grad():
            return run.outputs()

    def to_host(self, array: torch.Tensor) -> np.ndarray:
        return to_numpy(array).copy()

    def kv_bytes(self, cache: CacheValue) -> int:
        return ReferenceAttention(cache.spec).kv_bytes(self._caches[cache.name])

    def fill(self, cache: CacheValue, value: float) -> None:
        ReferenceAttention(cache.spec).fill(self._caches[cache.name], value)

    def read_slots(self, cache: CacheValue, slots: np.ndarray) -> Sequence[np.ndarray]:
        found = ReferenceAttention(cache.spec).read_slots(self._caches[cache.name], torch.from_numpy(slots))
        return [to_numpy(tensor) for tensor in found]

    def read_state(self, state: StateValue) -> np.ndarray:
        return to_numpy(self._states[state.name]).copy()

    def write_state(self, state: StateValue, array: np.ndarray) -> None:
        self._states[state.name].copy_(to_torch(array, state.tensor.dtype))

    def block_format(self, cache: CacheValue) -> str:
        return ReferenceAttention(cache.spec).block_format(self._caches[cache.name], self._block_size)

    def export_blocks(self, cache: CacheValue, blocks: np.ndarray, out: np.ndarray) -> BlockTransfer | None:
        return ReferenceAttention(cache.spec).export_blocks(self._caches[cache.name], blocks, out)

    def import_blocks(self, cache: CacheValue, blocks: np.ndarray, data: np.ndarray) -> BlockTransfer | None:
        return ReferenceAttention(cache.spec).import_blocks(self._caches[cache.name], blocks, data)

    def export_slots(self, state: StateValue, slots: np.ndarray, out: np.ndarray) -> BlockTransfer | None:
        return _state_backend(state).export_slots((self._states[state.name],), slots, out)

    def import_slots(self, state: StateValue, slots: np.ndarray, data: np.ndarray) -> BlockTransfer | None:
        return _state_backend(state).import_slots((self._states[state.name],), slots, data)

    def close(self) -> None:
        self.free_caches()
        self._arrays = {}


class _Run:
    """One run of one graph."""

    caches: Mapping[str, KVCache]
    states: Mapping[str, torch.Tensor]

    def __init__(self, graph: StepGraph, sizes: StepSizes, block_size: int) -> None:
        self._graph, self._sizes, self._block_size = graph, sizes, block_size
        self.arrays: dict[str, torch.Tensor] = {}
        self._metadata: dict[tuple[Any, ...], Any] = {}

    def outputs(self) -> list[torch.Tensor]:
        for node in self._graph.nodes:
            results = self._results(node)
            for value, result in zip(node.outputs, results, strict=True):
                self._check(node, value, result)
                self.arrays[value.name] = result
        return [self.arrays[name] for name in self._graph.outputs]

    def _results(self, node: Node) -> Sequence[torch.Tensor]:
        if node.op == PAGED_ATTENTION:
            return [self._attention(node)]
        operation = GRAPH_OPERATIONS[node.op]
        assert operation.reference is not None, "only attention has no reference"
        inputs = [None if name is None else self._array(name) for name in node.inputs]
        symbols = self._sizes.symbols()
        attributes = {name: _number(entry, symbols) for name, entry in node.attributes.items()}
        if operation.group == "array":
            made = operation.reference(*inputs, **attributes)
        else:
            attributes.setdefault("max_query_len", self._sizes.max_query_len)
            made = operation.reference(*unflatten(operation.reference, inputs, attributes))
        return made if isinstance(made, tuple) else [made]

    def _array(self, name: str) -> torch.Tensor:
        return self.states[name] if name in self.states else self.arrays[name]

    def _attention(self, node: Node) -> torch.Tensor:
        spec = AttentionSpec(**node.attributes)
        backend = ReferenceAttention(spec)
        given = dict(zip(PAGED_ATTENTION_INPUTS, node.inputs, strict=True))
        query, key, value, sinks = (
            None if (name := given[part]) is None else self._array(name) for part in PAGED_ATTENTION_INPUTS[:4]
        )
        names = given["block_table"], given["slot_mapping"], given["query_start_loc"], given["seq_lens"]
        if (spec, names) not in self._metadata:
            self._metadata[spec, names] = backend.build_metadata(self._layout(*(self.arrays[str(n)] for n in names)))
        metadata, cache = self._metadata[spec, names], self.caches[str(given["cache"])]
        assert query is not None, "attention has queries"
        if key is not None:
            backend.write_kv(cache, key, key[..., : spec.value_size] if value is None else value, metadata)
        return backend.forward(query, cache, metadata, sinks)

    def _layout(
        self, block_table: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor, seq_lens: torch.Tensor
    ) -> BatchLayout:
        sizes = self._sizes
        return BatchLayout(
            num_requests=sizes.requests,
            num_tokens=sizes.tokens,
            max_query_len=sizes.max_query_len,
            max_seq_len=sizes.max_seq_len,
            block_size=self._block_size,
            query_start_loc=starts.numpy(),
            seq_lens=seq_lens.numpy(),
            block_table=block_table.numpy(),
            slot_mapping=slots.numpy(),
            query_start_loc_device=starts,
            seq_lens_device=seq_lens,
            block_table_device=block_table,
            slot_mapping_device=slots,
            kind=sizes.kind,
            num_decodes=sizes.num_decodes,
        )

    def _check(self, node: Node, value: Value, result: torch.Tensor) -> None:
        expected = tuple(substitute(dim, self._sizes.symbols()) for dim in value.shape)
        if expected != tuple(result.shape) or str(result.dtype) != f"torch.{value.dtype}":
            raise PlatformError(
                f"{node.op} made {result.dtype}{list(result.shape)}, but the graph has {value.dtype}{list(expected)}."
            )


def _state_backend(state: StateValue) -> StateBackend:
    return StateBackend(StateSpec((state.tensor,)))


def _number(entry: Any, symbols: Mapping[str, int]) -> Any:
    if isinstance(entry, tuple):
        return tuple(_number(each, symbols) for each in entry)
    return substitute(entry, symbols) if isinstance(entry, str) else entry

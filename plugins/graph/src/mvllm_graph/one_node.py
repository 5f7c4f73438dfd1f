"""Single operations and layers of attention as programs of one node.

They give a platform with a graph compiler the op providers and attention backends that the conformance suite tests. No
model uses them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from mvllm.extension_api.models import dtype_name, torch_dtype
from mvllm.plugin_api import (
    AttentionBackend,
    AttentionSpec,
    BatchLayout,
    BlockTransfer,
    CacheValue,
    Dim,
    GraphCompiler,
    GraphProgram,
    KVLayout,
    Node,
    OpCase,
    OpProvider,
    StateTensor,
    StateValue,
    StepGraph,
    StepSizes,
    Value,
)
from mvllm_graph.arguments import FlatArguments, flatten
from mvllm_graph.arrays import to_numpy, to_torch
from mvllm_graph.operations import (
    GRAPH_OPERATIONS,
    PAGED_ATTENTION,
    PAGED_ATTENTION_INPUTS,
    STATE_STEP,
    GraphOperation,
)
from mvllm_graph.recorded_calls import attention_attributes, result_like

_WEIGHTS = frozenset(
    {
        *("weight", "bias", "gate_up", "gate_up_bias", "down", "down_bias", "up", "correction", "cos_sin"),
        *("a", "d", "dt_bias"),
    }
)
"""Parameters of operations that are weights and constants of a model."""

_KEPT_PROGRAMS = 32
_DTYPES = ("float32", "bfloat16", "float16")

# ---------------------------------------------------------------------------------------------------------- operations


def one_node_providers(compiler: GraphCompiler, platform: str) -> list[OpProvider]:
    """A provider for each operation of models that the compiler translates."""
    known = set(compiler.operations())
    return [
        OpProvider(op.name, f"{platform}-graph", OneNodeOp(op, compiler), supports=_supported_dtype)
        for op in GRAPH_OPERATIONS.values()
        if op.group in ("named", "optional") and op.name in known
    ]


def _supported_dtype(case: OpCase) -> list[str]:
    return [] if case.dtype in _DTYPES else [f"graphs compute in {', '.join(_DTYPES)}, not in {case.dtype}"]


class OneNodeOp:
    """One operation, called like its reference. Programs of the last few shapes are kept.

    Args:
        operation: The operation.
        compiler: Makes the programs.
    """

    def __init__(self, operation: GraphOperation, compiler: GraphCompiler) -> None:
        assert operation.reference is not None, "attention has a backend"
        self._operation, self._compiler = operation, compiler
        self._reference: Callable[..., Any] = operation.reference
        self._programs: list[_OneNodeProgram] = []
        self.__name__ = operation.name
        self.__signature__ = inspect.signature(operation.reference)

    def __call__(self, *args: Any) -> Any:
        flat = flatten(self._reference, args)
        graph = _graph_of(self._operation, flat)
        found = next((program for program in self._programs if program.graph == graph), None)
        if found is None:
            if len(self._programs) >= _KEPT_PROGRAMS:
                self._programs.pop(0).program.close()
            found = _OneNodeProgram(graph, self._compiler.program([graph]))
            self._programs.append(found)
        results = found.run(flat)
        return results[0] if len(results) == 1 else tuple(results)


@dataclass
class _OneNodeProgram:
    """A graph of one node and its program."""

    graph: StepGraph
    program: GraphProgram
    is_finished: bool = False

    def run(self, flat: FlatArguments) -> list[torch.Tensor]:
        """Runs it, and updates the states among the arguments."""
        values = self.graph.values()
        step, states, sizes = {}, [], {"T": 1, "R": 1}
        for label, array in zip(flat.labels, flat.inputs, strict=True):
            if array is None:
                continue
            value = values[label] if label in values else values["state.0.0"]
            if isinstance(value, StateValue):
                states.append((value, array))
            elif value.kind == "step":
                step[label] = to_numpy(array)
                sizes |= {dim: size for dim, size in zip(value.shape, array.shape, strict=True) if dim in ("T", "R")}
            else:
                self.program.set_weight(label, to_numpy(array))
        if not self.is_finished:
            self.program.finish_weights()
            self.is_finished = True
        for value, array in states:
            self.program.allocate_states(array.shape[0] - 1)
            self.program.write_state(value, to_numpy(array))
        lengths = np.diff(step["query_start_loc"]) if "query_start_loc" in step else np.array([sizes["T"]])
        most = int(flat.attributes.get("max_query_len", lengths.max(initial=1)))
        of_step = StepSizes(sizes["T"], sizes["R"], 1, sizes["T"], max_query_len=most, max_seq_len=most)
        outputs = self.graph.nodes[0].outputs
        results = [
            to_torch(self.program.to_host(found), value.dtype)
            for found, value in zip(self.program.run(self.graph.name, step, of_step), outputs, strict=True)
        ]
        for value, array in states:
            array.copy_(to_torch(self.program.read_state(value), value.tensor.dtype))
        return results


def _graph_of(operation: GraphOperation, flat: FlatArguments) -> StepGraph:
    """One node for the arguments of a call, for any number of tokens and requests."""
    first = next(array for array in flat.inputs if array is not None)
    inputs: dict[str, Value] = {}
    names: list[str | None] = []
    for label, array in zip(flat.labels, flat.inputs, strict=True):
        if array is None:
            names.append(None)
            continue
        shape: tuple[Dim, ...] = tuple(array.shape)
        dtype = dtype_name(array.dtype)
        value: Value
        if label in operation.updates:
            value = StateValue("state.0.0", "state", (), dtype, StateTensor(tuple(array.shape[1:]), dtype), 0, 0)
        elif label in STATE_STEP and operation.updates:
            value = Value(label, "step", ("R+1" if label == "query_start_loc" else "R",), dtype)
        elif label.split(".", 1)[0] in _WEIGHTS:
            value = Value(label, "weight", shape, dtype)
        else:
            value = Value(label, "step", ("T", *shape[1:]), dtype)
        inputs[value.name] = value
        names.append(value.name)
    attributes = dict(flat.attributes)
    if operation.updates:
        attributes.pop("max_query_len")
    meta = [None if array is None else array.to("meta") for array in flat.inputs]
    made = result_like(operation.name, meta, flat.attributes)
    outputs = tuple(
        Value(f"v{i}", "result", ("T", *array.shape[1:]), dtype_name(array.dtype))
        for i, array in enumerate(made if isinstance(made, tuple) else (made,))
    )
    assert all(len(array.shape) and array.shape[0] == first.shape[0] for array in meta[:1] if array is not None)
    node = Node(operation.name, tuple(names), outputs, attributes)
    return StepGraph("op", tuple(inputs.values()), (node,), tuple(value.name for value in outputs))


# ----------------------------------------------------------------------------------------------------------- attention

_ATTEND, _READ = "attend", "read"


@dataclass(frozen=True)
class _StepArrays:
    """The step inputs of attention, and the sizes."""

    arrays: dict[str, np.ndarray]
    sizes: StepSizes


class OneNodeAttention(AttentionBackend):
    """Attention of one layer as programs: one that stores keys and values, one that only reads.

    Attributes:
        compiler: Makes the programs; set by a subclass.
        kv_dtypes: Storage dtypes that the platform claims; set by a subclass.
    """

    compiler: ClassVar[GraphCompiler]
    kv_dtypes: ClassVar[tuple[str, ...]]

    @classmethod
    def of(cls, compiler: GraphCompiler, kv_dtypes: tuple[str, ...]) -> type[OneNodeAttention]:
        """The backend of a compiler."""
        return type(cls.__name__, (cls,), {"compiler": compiler, "kv_dtypes": kv_dtypes})

    @classmethod
    def validate(cls, spec: AttentionSpec) -> list[str]:
        reasons = spec.contradictions()
        if spec.kv_dtype not in cls.kv_dtypes:
            reasons.append(f"the KV cache is stored as {' or '.join(cls.kv_dtypes)}, not as {spec.kv_dtype}")
        if not reasons:
            reasons += [reason for graph in _attention_graphs(spec) for reason in cls.compiler.unsupported(graph)]
        return list(dict.fromkeys(reasons))

    def kv_layout(self) -> KVLayout:
        program = self._new_program()
        try:
            return program.kv_layout(_cache_value(self.spec))
        finally:
            program.close()

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> GraphProgram:
        program = self._new_program()
        program.allocate_caches(num_blocks, block_size)
        return program

    def build_metadata(self, batch: BatchLayout) -> _StepArrays:
        sizes = StepSizes(
            tokens=batch.num_tokens,
            requests=batch.num_requests,
            pages=batch.block_table.shape[1],
            logits_rows=batch.num_requests,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            num_decodes=batch.num_decodes,
            kind=batch.kind,
        )
        arrays = {
            "block_table.0": batch.block_table,
            "slot_mapping.0": batch.slot_mapping,
            "query_start_loc": batch.query_start_loc,
            "seq_lens": batch.seq_lens,
        }
        return _StepArrays({name: np.ascontiguousarray(array) for name, array in arrays.items()}, sizes)

    def write_kv(self, kv: GraphProgram, key: torch.Tensor, value: torch.Tensor, metadata: _StepArrays) -> None:
        query = np.zeros((key.shape[0], self.spec.num_heads, self.spec.head_size), to_numpy(key).dtype)
        given = {"query": query, "key": to_numpy(key)}
        if not self.spec.values_in_keys:
            given["value"] = to_numpy(value)
        kv.to_host(kv.run(_ATTEND, given | metadata.arrays, metadata.sizes)[0])

    def forward(
        self, query: torch.Tensor, kv: GraphProgram, metadata: _StepArrays, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        if sinks is not None:
            kv.set_weight("sinks", to_numpy(sinks))
        found = kv.run(_READ, {"query": to_numpy(query)} | metadata.arrays, metadata.sizes)[0]
        return to_torch(kv.to_host(found), self.spec.dtype)

    def kv_bytes(self, kv: GraphProgram) -> int:
        return kv.kv_bytes(_cache_value(self.spec))

    def fill(self, kv: GraphProgram, value: float) -> None:
        kv.fill(_cache_value(self.spec), value)

    def read_slots(self, kv: GraphProgram, slots: torch.Tensor) -> Sequence[torch.Tensor]:
        found = kv.read_slots(_cache_value(self.spec), slots.cpu().numpy())
        return [torch.from_numpy(array) for array in found]

    def block_format(self, kv: GraphProgram, block_size: int) -> str:
        return kv.block_format(_cache_value(self.spec))

    def export_blocks(self, kv: GraphProgram, blocks: np.ndarray, out: np.ndarray) -> BlockTransfer | None:
        return kv.export_blocks(_cache_value(self.spec), blocks, out)

    def import_blocks(self, kv: GraphProgram, blocks: np.ndarray, data: np.ndarray) -> BlockTransfer | None:
        return kv.import_blocks(_cache_value(self.spec), blocks, data)

    def _new_program(self) -> GraphProgram:
        program = self.compiler.program(_attention_graphs(self.spec))
        if self.spec.sinks:
            program.set_weight("sinks", to_numpy(torch.zeros(self.spec.num_heads, dtype=torch_dtype(self.spec.dtype))))
        program.finish_weights()
        return program


def _cache_value(spec: AttentionSpec) -> CacheValue:
    return CacheValue("cache.0", "cache", (), spec.kv_dtype, spec, 0)


def _attention_graphs(spec: AttentionSpec) -> list[StepGraph]:
    """`attend` with keys and values, and `read` without."""
    step = {
        "block_table": Value("block_table.0", "step", ("R", "P"), "int32"),
        "slot_mapping": Value("slot_mapping.0", "step", ("T",), "int32"),
        "query_start_loc": Value("query_start_loc", "step", ("R+1",), "int32"),
        "seq_lens": Value("seq_lens", "step", ("R",), "int32"),
        "query": Value("query", "step", ("T", spec.num_heads, spec.head_size), spec.dtype),
        "key": Value("key", "step", ("T", spec.num_kv_heads, spec.head_size), spec.dtype),
        "value": Value("value", "step", ("T", spec.num_kv_heads, spec.value_size), spec.dtype),
        "sinks": Value("sinks", "weight", (spec.num_heads,), spec.dtype),
        "cache": _cache_value(spec),
    }
    graphs = []
    for name in (_ATTEND, _READ):
        absent = {"key", "value"} if name == _READ else {"value"} if spec.values_in_keys else set()
        absent = absent if spec.sinks else absent | {"sinks"}
        inputs = [None if part in absent else step[part] for part in PAGED_ATTENTION_INPUTS]
        output = Value("v0", "result", ("T", spec.num_heads * spec.value_size), spec.dtype)
        node = Node(
            PAGED_ATTENTION,
            tuple(None if value is None else value.name for value in inputs),
            (output,),
            attention_attributes(spec),
        )
        graphs.append(StepGraph(name, tuple(value for value in inputs if value is not None), (node,), ("v0",)))
    return graphs

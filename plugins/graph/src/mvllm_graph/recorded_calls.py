"""Operations of models as single calls in a trace, instead of the many torch operations of their references.

While a model is traced, its operations are the functions of `recording_providers`. Each call goes through one torch
operation, `mvllm_graph::call(number, arrays)`, whose number leads to what torch cannot represent: name, attributes,
caches and states. Its results have shapes and no data.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from mvllm.extension_api.models import torch_dtype
from mvllm.extension_api.worker import GroupCoordinator
from mvllm.plugin_api import (
    AttentionBackend,
    AttentionSpec,
    BatchLayout,
    CacheValue,
    GroupSpec,
    KVLayout,
    OpProvider,
    PlatformError,
    StateValue,
    Value,
)
from mvllm_graph.arguments import flatten, unflatten
from mvllm_graph.operations import GRAPH_OPERATIONS, NEVER_TRACED, PAGED_ATTENTION

PROVIDER = "graph"
"""Name of the providers of recorded operations."""

Arrays = Sequence[torch.Tensor | None]


@dataclass
class RecordedCall:
    """One call of an operation.

    Attributes:
        op: Its name.
        attributes: Arguments that are no arrays.
        values: By position among the inputs of the graph: caches and states, which are not arrays of the trace.
        results: Makes results of the right shapes and dtypes from the arrays.
    """

    op: str
    attributes: Mapping[str, Any]
    values: Mapping[int, Value]
    results: Callable[[Arrays], Sequence[torch.Tensor]]


@dataclass
class Recording:
    """The calls of one trace.

    Attributes:
        calls: All calls; a call's number is its index.
        states: State tensors of the layers, by id.
    """

    calls: list[RecordedCall] = field(default_factory=list)
    states: dict[int, StateValue] = field(default_factory=dict)

    def call(self, call: RecordedCall, arrays: Arrays) -> list[torch.Tensor]:
        """Records a call."""
        self.calls.append(call)
        return list(torch.ops.mvllm_graph.call(len(self.calls) - 1, list(arrays)))


class _Current(threading.local):
    """The recordings of this thread's traces, the innermost last."""

    def __init__(self) -> None:
        self.recordings: list[Recording] = []


_current = _Current()


@contextmanager
def recording() -> Iterator[Recording]:
    """The calls inside the context are recorded."""
    _current.recordings.append(Recording())
    try:
        yield _current.recordings[-1]
    finally:
        _current.recordings.pop()


def current_recording() -> Recording:
    """The recording of the trace that is being made.

    Raises:
        PlatformError: No trace is being made: on such a platform, attention runs in graphs only.
    """
    if not _current.recordings:
        raise PlatformError("Attention of a model was called outside of its graph.")
    return _current.recordings[-1]


_LIBRARY = torch.library.Library("mvllm_graph", "DEF")
_LIBRARY.define("call(int number, Tensor?[] arrays) -> Tensor[]")


@torch.library.register_fake("mvllm_graph::call", lib=_LIBRARY)
def _results(number: int, arrays: Arrays) -> list[torch.Tensor]:
    return list(current_recording().calls[number].results(arrays))


# ---------------------------------------------------------------------------------------------------------- operations


def recording_providers(operations: Collection[str]) -> list[OpProvider]:
    """Providers that record the operations among `operations`. Others are traced through their references.

    Outside of a trace they are the references: parts of a model that no graph has run on the host.
    Operations that cannot be traced are recorded for every compiler, so that a refusal names all that it lacks.
    """
    recorded = NEVER_TRACED | set(operations)
    return [
        OpProvider(op.name, PROVIDER, _recorder(op.name))
        for op in GRAPH_OPERATIONS.values()
        if op.group in ("named", "optional") and op.name in recorded
    ]


def _recorder(op: str) -> Callable[..., Any]:
    def function(*args: Any) -> Any:
        if not _current.recordings:  # of a part of the model that is in no graph, such as a classification head
            reference = GRAPH_OPERATIONS[op].reference
            assert reference is not None, "attention has a backend"
            return reference(*args)
        return _record(op, args)

    function.__name__ = op
    return function


def _record(op: str, args: Sequence[Any]) -> Any:
    operation, trace = GRAPH_OPERATIONS[op], current_recording()
    assert operation.reference is not None, "attention has a backend"
    flat = flatten(operation.reference, args)
    values: dict[int, Value] = {}
    for i, label in enumerate(flat.labels):
        if label in operation.updates:
            values[i] = trace.states[id(flat.inputs[i])]
            flat.inputs[i] = None
    attributes = dict(flat.attributes)
    if operation.updates:
        attributes.pop("max_query_len")  # StepSizes has it

    def results(arrays: Arrays) -> Sequence[torch.Tensor]:
        made = result_like(op, arrays, flat.attributes)
        return list(made) if isinstance(made, tuple) else [made]

    made = trace.call(RecordedCall(op, attributes, values, results), flat.inputs)
    return made[0] if len(made) == 1 else tuple(made)


_LIKE_FIRST_INPUT = frozenset(
    {
        *("causal_conv1d", "ssd", "moe", "gelu_tanh_moe", "clamped_moe", "ungated_moe"),
        *("quantized_moe", "quantized_ungated_moe"),
        "add_lora_by_slot",
    }
)
"""Operations whose result has the shape and dtype of their first input."""


def result_like(op: str, arrays: Arrays, attributes: Mapping[str, Any]) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Arrays like the results of a named operation: shapes and dtypes, no values."""
    x = arrays[0]
    assert x is not None, "the first input is an array"
    if op in _LIKE_FIRST_INPUT:
        return torch.empty_like(x)
    if op in ("gated_delta_rule", "kda"):
        value = arrays[2]
        assert value is not None, "the operation has values"
        return torch.empty_like(value)
    if op in ("quantized_linear", "float8_linear", "quantized_linear_silu_and_mul"):
        weight = arrays[1]
        assert weight is not None, "the operation has a weight"
        return x.new_empty((*x.shape[:-1], weight.shape[0] // (2 if op.endswith("silu_and_mul") else 1)))
    if op in ("block_quantized_linear", "block_quantized_linear_silu_and_mul"):
        rows = sum(part.shape[0] for part in arrays[1 : 1 + attributes["weight.parts"]] if part is not None)
        return x.new_empty((*x.shape[:-1], rows // (2 if op.endswith("silu_and_mul") else 1)))
    reference = GRAPH_OPERATIONS[op].reference
    assert reference is not None, "the operation has a reference"
    result: torch.Tensor | tuple[torch.Tensor, ...] = reference(*unflatten(reference, arrays, attributes))
    return result


# ----------------------------------------------------------------------------------------------------------- attention


@dataclass
class GraphCache:
    """What a layer's `kv_cache` is in a trace.

    Attributes:
        value: The cache in the graph.
        pending: Key and value of the step, between `write_kv` and `forward`.
    """

    value: CacheValue
    pending: tuple[torch.Tensor, torch.Tensor | None] | None = None


@dataclass(frozen=True)
class GraphMetadata:
    """The attention metadata of a trace: the step inputs of one KV cache group."""

    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor


class RecordedAttention(AttentionBackend):
    """The attention backend of models that run as graphs: records `paged_attention`.

    Args:
        spec: The spec.
        layout: `GraphProgram.kv_layout` once there is a program; before, an estimate without block sizes.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        sizes = spec.head_size + (0 if spec.values_in_keys else spec.value_size)
        self.layout = KVLayout((), spec.num_kv_heads * sizes * torch_dtype(spec.kv_dtype).itemsize)

    @classmethod
    def validate(cls, spec: AttentionSpec) -> list[str]:
        return spec.contradictions()

    def kv_layout(self) -> KVLayout:
        return self.layout

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> Any:
        raise PlatformError("Caches of a model that runs as a graph are allocated by its program.")

    def build_metadata(self, batch: BatchLayout) -> Any:
        return None

    def write_kv(self, kv: GraphCache, key: torch.Tensor, value: torch.Tensor, metadata: GraphMetadata) -> None:
        assert kv.pending is None, "a layer attends after it has stored keys and values"
        kv.pending = key, (None if self.spec.values_in_keys else value)

    def forward(
        self, query: torch.Tensor, kv: GraphCache, metadata: GraphMetadata, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        key, value = (None, None) if kv.pending is None else kv.pending
        kv.pending = None
        arrays = (query, key, value, sinks, None, metadata.block_table, metadata.slot_mapping)
        call = RecordedCall(PAGED_ATTENTION, attention_attributes(self.spec), {4: kv.value}, self._results)
        return current_recording().call(call, (*arrays, metadata.query_start_loc, metadata.seq_lens))[0]

    def _results(self, arrays: Arrays) -> Sequence[torch.Tensor]:
        query = arrays[0]
        assert query is not None, "attention has queries"
        return [query.new_empty((query.shape[0], self.spec.num_heads * self.spec.value_size))]


def attention_attributes(spec: AttentionSpec) -> dict[str, Any]:
    """The fields of a spec, as attributes of `paged_attention`."""
    return dict(vars(spec))


# --------------------------------------------------------------------------------------------------------- collectives


class RecordedGroup(GroupCoordinator):
    """The tensor-parallel ranks of models that run as graphs: records `all_reduce` and `all_gather`.

    Args:
        spec: The group. It needs no communicator.
    """

    def __init__(self, spec: GroupSpec) -> None:
        super().__init__(GroupSpec(spec.name, (spec.rank,), spec.rank))
        self.spec, self.rank_in_group, self.world_size = spec, spec.rank_in_group, len(spec.ranks)

    @property
    def fuses_add_rms_norm(self) -> bool:
        return False

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.world_size == 1 else self._record("all_reduce", tensor, {}, torch.empty_like)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        if self.world_size == 1:
            return tensor
        dim %= tensor.dim()

        def gathered(array: torch.Tensor) -> torch.Tensor:
            shape = list(array.shape)
            shape[dim] *= self.world_size
            return array.new_empty(shape)

        return self._record("all_gather", tensor, {"dim": dim}, gathered)

    def _record(
        self, op: str, tensor: torch.Tensor, attributes: dict[str, Any], like: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        def results(arrays: Arrays) -> Sequence[torch.Tensor]:
            assert arrays[0] is not None, "a collective has an input"
            return [like(arrays[0])]

        of_group = {"group": self.name, "world_size": self.world_size}
        return current_recording().call(RecordedCall(op, attributes | of_group, {}, results), [tensor])[0]

"""GRAPH_OPERATIONS: every operation that occurs in StepGraphs.

named       the operations of models (mvllm.ops), with the same names and arguments
optional    fused or alternative operations, which occur only if the compiler names them
attention   paged attention over a KV cache
collective  sums and concatenations over tensor-parallel ranks, which occur only if the compiler names them
array       a closed set of elementwise operations, reductions and changes of shape
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mvllm.extension_api.contract import ANY, phase
from mvllm.extension_api.models import SCHEMAS
from mvllm_graph.array_operations import ARRAY_OPERATIONS

PAGED_ATTENTION = "paged_attention"
PAGED_ATTENTION_INPUTS = (
    "query", "key", "value", "sinks", "cache", "block_table", "slot_mapping", "query_start_loc", "seq_lens",
)  # fmt: skip

STATE_STEP = ("query_start_loc", "read_slots", "write_slots")
"""Inputs of operations on sequence states that follow the state."""


@phase(ANY)
@dataclass(frozen=True)
class GraphOperation:
    """One operation of StepGraphs.

    Attributes:
        name: Its name.
        group: `named`, `optional`, `attention`, `collective` or `array`.
        summary: One sentence.
        definition: The exact semantics: the docstring of the reference.
        parameters: Names of the reference's parameters: inputs, and attributes.
        reference: Computes it with torch tensors; None for attention and collectives.
        updates: Parameters that are sequence states, which it reads and writes.
        if_left_out: For a named operation that a compiler does not name: `traced` as array operations, or `refused`,
            and every model that has it. None for other groups.
    """

    name: str
    group: Literal["named", "optional", "attention", "collective", "array"]
    summary: str
    definition: str
    parameters: tuple[str, ...]
    reference: Callable[..., Any] | None = None
    updates: tuple[str, ...] = ()
    if_left_out: Literal["traced", "refused"] | None = None


NEVER_TRACED = frozenset(
    {
        *("causal_conv1d", "ssd", "gated_delta_rule", "kda"),  # they update a state, and loop over requests
        *("quantized_linear", "layer_norm"),  # torch operations that are no array operations
    }
)
"""Named operations whose definitions are no array operations. They are nodes of a graph for every compiler."""

_NOT_IN_GRAPHS = frozenset({"argmax", "logsumexp", "filtered_draw", "add_lora", "encoder_attention"})
"""Operations that core computes on the host, and those by segments or sequences that only the host knows."""

_ALWAYS_NAMED = frozenset({"add_lora_by_slot"})
"""Operations that replace others on other platforms, and occur in every graph with LoRA."""

_OPTIONAL = frozenset({"quantized_moe", "quantized_ungated_moe"})
"""Optional besides those that replace other operations: no layer runs its reference."""

_ATTENTION_DEFINITION = """Stores keys and values in the KV cache, and computes attention of the step's queries over it.

First, if key is given, row t of key and value is stored in slot slot_mapping[t]; slot -1 stores nothing. Then each
query attends, causally, to the keys of its request that the cache holds: as `AttentionBackend.write_kv` and `forward`.

Inputs:
    query: [T, num_heads, head_size], compute dtype.
    key: [T, num_kv_heads, head_size], compute dtype; absent for a layer that reads another layer's cache.
    value: [T, num_kv_heads, value_size], compute dtype; absent without key, and with `values_in_keys`.
    sinks: [num_heads], compute dtype: the extra logit of each head; absent without sinks.
    cache: A CacheValue.
    block_table: [R, P]: blocks of each request; token t of request r is in slot
        block_table[r, t // block_size] * block_size + t % block_size.
    slot_mapping: [T].
    query_start_loc: [R + 1]: tokens of request r are query_start_loc[r] to query_start_loc[r + 1] - 1.
    seq_lens: [R]: tokens of each sequence after this step; the queries of request r are its last tokens.

Attributes:
    The fields of AttentionSpec.

Result:
    [T, num_heads * value_size], compute dtype. Rows of padding tokens are unspecified but finite."""


def _named(name: str) -> GraphOperation:
    schema = SCHEMAS[name]
    is_optional = (schema.replaces_others and name not in _ALWAYS_NAMED) or name in _OPTIONAL
    group: Literal["named", "optional"] = "optional" if is_optional else "named"
    definition = inspect.getdoc(schema.reference) or ""
    left_out: Literal["traced", "refused"] | None = None
    if group == "named":
        left_out = "refused" if name in NEVER_TRACED else "traced"
    return GraphOperation(
        name, group, schema.summary, definition, schema.parameters, schema.reference, schema.updates, left_out
    )


def _array(name: str, function: Callable[..., Any]) -> GraphOperation:
    definition = inspect.getdoc(function) or ""
    parameters = tuple(inspect.signature(function).parameters)
    return GraphOperation(name, "array", definition.partition("\n")[0], definition, parameters, function)


_COLLECTIVES = {
    "all_reduce": (
        ("x",),
        """The sum of x over the ranks of a group.

Inputs:
    x: [...], the same shape on every rank.

Attributes:
    group: Name of the group of `Platform.communicator`: `tp`.
    world_size: Number of its ranks.

Result:
    Like x, the same on every rank.""",
    ),
    "all_gather": (
        ("x",),
        """The arrays of all ranks of a group, concatenated in the order of the ranks.

Inputs:
    x: [...], the same shape on every rank.

Attributes:
    dim: The dimension along which they are concatenated.
    group: Name of the group of `Platform.communicator`: `tp`.
    world_size: Number of its ranks.

Result:
    Like x, `world_size` times as large along `dim`; the same on every rank.""",
    ),
}


GRAPH_OPERATIONS: Mapping[str, GraphOperation] = {
    **{name: _named(name) for name in SCHEMAS if name not in _NOT_IN_GRAPHS},
    PAGED_ATTENTION: GraphOperation(
        PAGED_ATTENTION,
        "attention",
        _ATTENTION_DEFINITION.partition("\n")[0],
        _ATTENTION_DEFINITION,
        PAGED_ATTENTION_INPUTS,
    ),
    **{
        name: GraphOperation(name, "collective", text.partition("\n")[0], text, parameters)
        for name, (parameters, text) in _COLLECTIVES.items()
    },
    **{name: _array(name, function) for name, function in ARRAY_OPERATIONS.items()},
}
"""The operations by name."""

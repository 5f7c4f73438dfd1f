"""StepGraph: the operations of one model's step as data, for devices that have a compiler of their own.

The package mvllm-graph traces each model once, with symbols for the sizes that differ from step to step. A graph
compiler of a platform (`graph_compiler.py`) translates the result to the operations of its runtime:

    inputs   token_ids [T], weights, cache.0 ...  ──>  nodes, in an order of execution  ──>  outputs

Every name is written once, no node changes its inputs, and nothing but KV caches and sequence states is kept between
steps. All of this is since contract 1.1.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import msgspec

from mvllm.contract import Phase, phase
from mvllm.platform.attention import AttentionSpec
from mvllm.platform.shapes import StepKind
from mvllm.platform.state import StateTensor

Dim = int | str
"""A size: a number, or an expression of one symbol such as `T`, `R+1`, `8*T` or `2*T-1`.

Symbols: T tokens of the step, R requests, P blocks per request (columns of the block table), L rows whose logits are
computed, N rows of embeddings of items. All after padding.
"""

Kind = Literal["weight", "constant", "cache", "state", "step", "result"]

_EXPRESSION = re.compile(r"(?:(\d+)\*)?([A-Z])([+-]\d+)?")


@phase(Phase.WORKER)
@dataclass(frozen=True)
class Value:
    """An array of a graph.

    Attributes:
        name: Its name, unique in all graphs of a program. A weight that two graphs read has the same name in both.
        kind: `weight`: set once, from the checkpoint. `constant`: set once, computed by core. `cache` and `state`: kept
            by the program between steps. `step`: given to each run. `result`: made by a node.
        shape: Its sizes; empty for a cache and a state, whose layouts are the platform's.
        dtype: Name of the dtype: `float32`, `bfloat16`, `float16`, `int32`, `int64`, `bool`, `uint8`, `int8`,
            `float8_e4m3fn`, `float8_e8m0fnu`. In NumPy arrays, bfloat16 is uint16 and the 8-bit floats are uint8: the
            bits of the elements. This holds for set_weight, run, to_host, read_slots, read_state and write_state.
    """

    name: str
    kind: Kind
    shape: tuple[Dim, ...]
    dtype: str


@phase(Phase.WORKER)
@dataclass(frozen=True)
class CacheValue(Value):
    """The KV cache of one attention layer, named `cache.<layer>`.

    Attributes:
        name, kind, shape, dtype: As in Value; the dtype is that of stored keys and values.
        spec: Heads, dtypes and settings of the layer.
        layer: Number of the layer among those with attention, on this rank.
    """

    spec: AttentionSpec
    layer: int


@phase(Phase.WORKER)
@dataclass(frozen=True)
class StateValue(Value):
    """One tensor of the sequence states of one layer, named `state.<layer>.<index>`.

    Attributes:
        name, kind, shape, dtype: As in Value.
        tensor: Shape and dtype of one sequence's state.
        layer: Number of the layer among those with states, on this rank.
        index: Which of the layer's state tensors it is.
    """

    tensor: StateTensor
    layer: int
    index: int


@phase(Phase.WORKER)
@dataclass(frozen=True)
class Node:
    """One operation.

    Attributes:
        op: Its name in GRAPH_OPERATIONS.
        inputs: Names of values in the order of the operation; None for an optional one that is absent.
        outputs: The results.
        attributes: Other arguments by name: numbers, strings, None, and tuples of them or of sizes.
    """

    op: str
    inputs: tuple[str | None, ...]
    outputs: tuple[Value, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)


@phase(Phase.WORKER)
@dataclass(frozen=True)
class StepGraph:
    """The operations of one part of a step. Given to `GraphCompiler.program`.

    Attributes:
        name: `model`: token ids to hidden states; `head`: hidden states to logits; `head-<space>`: those of a token
            space. Of tensor-parallel ranks parts between collectives, `model.0`, `model.1`, ...; a step input of a part
            that is none of those below has the name of the result of an earlier part, or of a collective.
        inputs: Every value that a node reads and no node makes. Step inputs are int32 unless it is said otherwise:
            token_ids [T]; positions [T]; prompt_lens [T]; intermediate [T, hidden_size], compute dtype, on later
            pipeline stages; query_start_loc [R+1]; seq_lens [R]; block_table.<g> [R, P] and slot_mapping.<g> [T] of
            KV cache group g; read_slots [R] and write_slots [R] of sequence states; adapter_slots [T] with LoRA;
            token_types [T] of encoders. Of models that take images, audio or embeddings: item_embeds [N, width],
            compute dtype; item_index [T], the row of it that each token takes, -1 for none and for padding; and with
            three-dimensional positions rope_positions [T, 3]. For `head` hidden [T, hidden_size], compute dtype, and
            logits_indices [L]. Padding is that of BatchLayout and StateLayout.
        nodes: The operations, in an order of execution.
        outputs: Names of the results.
    """

    name: str
    inputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]

    def values(self) -> dict[str, Value]:
        """All values by name."""
        made = (value for node in self.nodes for value in node.outputs)
        return {value.name: value for value in (*self.inputs, *made)}

    def inputs_of(self, *kinds: Kind) -> list[Value]:
        """The inputs of some kinds, in order."""
        return [value for value in self.inputs if value.kind in kinds]

    def with_sizes(self, **sizes: int) -> StepGraph:
        """A copy with numbers in place of symbols, for compilers with static shapes.

        Args:
            sizes: Numbers by symbol, for instance T=16; symbols that are left out stay.
        """

        def value(old: Value) -> Value:
            return replace(old, shape=tuple(substitute(dim, sizes) for dim in old.shape))

        nodes = tuple(
            Node(
                node.op,
                node.inputs,
                tuple(value(output) for output in node.outputs),
                {name: _substituted(entry, sizes) for name, entry in node.attributes.items()},
            )
            for node in self.nodes
        )
        return StepGraph(self.name, tuple(value(old) for old in self.inputs), nodes, self.outputs)

    def to_bytes(self) -> bytes:
        """The graph as MessagePack, for another process."""
        return msgspec.msgpack.encode(dataclasses.asdict(self))

    @staticmethod
    def from_bytes(data: bytes) -> StepGraph:
        """The graph that `to_bytes` encoded.

        Raises:
            msgspec.DecodeError, KeyError, TypeError: The data are something else.
        """
        fields = msgspec.msgpack.decode(data)
        nodes = tuple(
            Node(
                node["op"],
                tuple(node["inputs"]),
                tuple(_value(output) for output in node["outputs"]),
                {name: _as_tuples(entry) for name, entry in node["attributes"].items()},
            )
            for node in fields["nodes"]
        )
        inputs = tuple(_value(entry) for entry in fields["inputs"])
        return StepGraph(fields["name"], inputs, nodes, tuple(fields["outputs"]))

    def __str__(self) -> str:
        """One line for each input and node."""
        values = self.values()
        lines = [f"graph {self.name}"]
        lines += [f"  {value.kind} {_text(value)}" for value in self.inputs]
        for node in self.nodes:
            inputs = ", ".join("-" if name is None else name for name in node.inputs)
            attributes = "".join(f", {name}={entry!r}" for name, entry in node.attributes.items())
            lines.append(f"  {', '.join(map(_text, node.outputs))} = {node.op}({inputs}{attributes})")
        lines.append(f"  return {', '.join(_text(values[name]) for name in self.outputs)}")
        return "\n".join(lines)


@phase(Phase.WORKER)
@dataclass(frozen=True)
class StepSizes:
    """Sizes of one step, known on the host. Given to `GraphProgram.run`.

    Attributes:
        tokens, requests, pages, logits_rows: The values of T, R, P and L in this run.
        max_query_len, max_seq_len, num_decodes, kind: As in BatchLayout.
        item_rows: The value of N in this run; at least 1 for a graph with `item_embeds`.
    """

    tokens: int
    requests: int
    pages: int
    logits_rows: int
    max_query_len: int
    max_seq_len: int
    num_decodes: int = 0
    kind: StepKind = StepKind.MIXED
    item_rows: int = 0

    def symbols(self) -> dict[str, int]:
        """The numbers by symbol."""
        return {"T": self.tokens, "R": self.requests, "P": self.pages, "L": self.logits_rows, "N": self.item_rows}


def substitute(dim: Dim, sizes: Mapping[str, int]) -> Dim:
    """The number of a size; the size itself if its symbol is not among `sizes`."""
    if isinstance(dim, int):
        return dim
    factor, symbol, term = _parsed(dim)
    return factor * sizes[symbol] + term if symbol in sizes else dim


@cache
def _parsed(dim: str) -> tuple[int, str, int]:
    """Factor, symbol and term of an expression; without a symbol if it is none."""
    match = _EXPRESSION.fullmatch(dim)
    return (0, "", 0) if match is None else (int(match[1] or 1), match[2], int(match[3] or 0))


def is_symbolic(entry: object) -> bool:
    """Whether an entry of a shape or an attribute is an expression of a symbol."""
    return isinstance(entry, str) and _EXPRESSION.fullmatch(entry) is not None


def _substituted(entry: Any, sizes: Mapping[str, int]) -> Any:
    if isinstance(entry, tuple):
        return tuple(_substituted(each, sizes) for each in entry)
    return substitute(entry, sizes) if isinstance(entry, str) else entry


def _as_tuples(entry: Any) -> Any:
    return tuple(_as_tuples(each) for each in entry) if isinstance(entry, list) else entry


def _value(fields: Mapping[str, Any]) -> Value:
    name, kind, shape, dtype = fields["name"], fields["kind"], tuple(fields["shape"]), fields["dtype"]
    if kind == "cache":
        return CacheValue(name, kind, shape, dtype, AttentionSpec(**fields["spec"]), fields["layer"])
    if kind == "state":
        tensor = StateTensor(tuple(fields["tensor"]["shape"]), fields["tensor"]["dtype"])
        return StateValue(name, kind, shape, dtype, tensor, fields["layer"], fields["index"])
    return Value(name, kind, shape, dtype)


def _text(value: Value) -> str:
    if isinstance(value, CacheValue | StateValue):
        return f"{value.name}: {value.dtype}"
    return f"{value.name}: {value.dtype}[{', '.join(map(str, value.shape))}]"

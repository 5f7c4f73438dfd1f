"""Parts of a graph between the collectives of tensor parallelism.

A runtime without collectives of its own runs a graph in parts. Core sums, or concatenates, arrays of all ranks between
them; every array that a later part reads is a result of its part and a step input of the later one:

    model    embedding ─ all_reduce ─ norm, attention ─ all_reduce ─ add, norm, MLP ─ ...
    parts    model.0                  model.1                        model.2          ...
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from mvllm.plugin_api import Kind, Node, StepGraph, Value

COLLECTIVES = ("all_reduce", "all_gather")
"""Operations on arrays of all ranks, in `GRAPH_OPERATIONS`."""


@dataclass(frozen=True)
class GraphPart:
    """One part, and the collectives that follow it.

    Attributes:
        graph: The part; None if a collective has no operation before it.
        collectives: Collectives in their order.
        needed: Names of the values that later parts, their collectives and the results read.
    """

    graph: StepGraph | None
    collectives: tuple[Node, ...]
    needed: frozenset[str]

    @cached_property
    def step_inputs(self) -> tuple[str, ...]:
        """Names of the step inputs of `graph`."""
        return () if self.graph is None else tuple(value.name for value in self.graph.inputs_of("step"))


@dataclass(frozen=True)
class CutGraph:
    """A graph as parts, in the order in which they run.

    Attributes:
        name: The name of the whole graph.
        parts: At least one. A graph without collectives is one part, with the same name.
        outputs: The results of the whole graph.
    """

    name: str
    parts: tuple[GraphPart, ...]
    outputs: tuple[Value, ...]

    @cached_property
    def has_collectives(self) -> bool:
        """Whether a part is followed by collectives."""
        return any(part.collectives for part in self.parts)

    @property
    def graphs(self) -> tuple[StepGraph, ...]:
        """The graphs of the parts."""
        return tuple(part.graph for part in self.parts if part.graph is not None)


def cut_graph(graph: StepGraph, operations: Collection[str] = ()) -> CutGraph:
    """Cuts a graph at its collectives.

    Args:
        graph: The graph.
        operations: Operations of the compiler. It is not cut at collectives among them.
    """
    values = graph.values()
    outputs = tuple(values[name] for name in graph.outputs)
    runs: list[tuple[list[Node], list[Node]]] = [([], [])]
    for node in graph.nodes:
        if node.op in COLLECTIVES and node.op not in operations:
            runs[-1][1].append(node)
        elif runs[-1][1]:
            runs.append(([node], []))
        else:
            runs[-1][0].append(node)
    if not runs[0][1]:
        return CutGraph(graph.name, (GraphPart(graph, (), frozenset(graph.outputs)),), outputs)
    parts: list[GraphPart] = []
    needed = frozenset(graph.outputs)
    for number, (nodes, collectives) in reversed(list(enumerate(runs))):
        wanted = (needed | _read(collectives)) - _made(collectives)
        part = _part(graph, f"{graph.name}.{number}", nodes, wanted) if nodes else None
        parts.append(GraphPart(part, tuple(collectives), needed))
        needed = (wanted | _read(nodes)) - _made(nodes)
    return CutGraph(graph.name, tuple(parts[::-1]), outputs)


def _read(nodes: Sequence[Node]) -> frozenset[str]:
    return frozenset(name for node in nodes for name in node.inputs if name is not None)


def _made(nodes: Sequence[Node]) -> frozenset[str]:
    return frozenset(value.name for node in nodes for value in node.outputs)


def _part(graph: StepGraph, name: str, nodes: Sequence[Node], wanted: Collection[str]) -> StepGraph:
    """The graph of some nodes, whose results that others want are its results."""
    given = {value.name: value for value in graph.inputs}
    values, read = graph.values(), _read(nodes)
    made = [value.name for node in nodes for value in node.outputs]
    own = frozenset(made)
    inputs = [value for value in graph.inputs if value.name in read]
    inputs += [
        dataclasses.replace(values[each], kind="step") for each in sorted(read - own - given.keys(), key=_number)
    ]
    return StepGraph(name, tuple(inputs), tuple(nodes), tuple(each for each in made if each in wanted))


def _number(name: str) -> int:
    return int(name[1:])


def distinct_inputs(graphs: Iterable[StepGraph], *kinds: Kind) -> dict[str, Value]:
    """The inputs of some kinds of several graphs, by name."""
    return {value.name: value for graph in graphs for value in graph.inputs_of(*kinds)}

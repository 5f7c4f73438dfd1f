"""What platforms with a graph compiler rely on, as data: the operations of graphs, and what GraphPlatform claims.

Read from the source of `mvllm.graph`, like the rest of the contract, since it imports torch and this module does not. A
test compares the result with GRAPH_OPERATIONS.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mvllm.platform.contract_operations import Operation
from mvllm.platform.source_parsing import function_parameters, parse_module

OPERATIONS = "mvllm.graph.operations"
ARRAY_OPERATIONS = "mvllm.graph.array_operations"
PLATFORM = "mvllm.graph.platform"

TRACED = "traced"
REFUSED = "refused"
UNUSED = "unused"


@dataclass
class GraphContractOperation:
    """One operation of StepGraphs.

    Attributes:
        group: As GraphOperation.group.
        if_left_out: What core does with an operation that a compiler does not name: `traced` as array operations of its
            definition; `refused`, with every model whose graphs have it; `unused`, since it occurs only if it is named.
        parameters: As written; empty for operations of models, which the contract lists with their parameters.
        type: Type of the result, as written; empty where `parameters` is.
    """

    group: str
    if_left_out: str
    parameters: list[str] = field(default_factory=list)
    type: str = ""

    def line(self, name: str) -> str:
        """The operation as a line of text."""
        signature = f"({', '.join(self.parameters)})" if self.parameters else ""
        returns = f" -> {self.type}" if self.type else ""
        return f"graph operation {name}{signature}{returns}  # {self.group}, {self.if_left_out} if left out"


def read_graph_operations(operations: Mapping[str, Operation]) -> dict[str, GraphContractOperation]:
    """All operations of graphs of this core, sorted by name.

    Args:
        operations: The operations of models, as `read_operations` gives them.
    """
    values = _values(parse_module(OPERATIONS))
    never_traced, absent, always_named, optional = (
        _strings(values[name]) for name in ("NEVER_TRACED", "_NOT_IN_GRAPHS", "_ALWAYS_NAMED", "_OPTIONAL")
    )
    found = {}
    for name in operations.keys() - absent:
        if name in optional or (operations[name].replaces_others and name not in always_named):
            found[name] = GraphContractOperation("optional", UNUSED)
        else:
            found[name] = GraphContractOperation("named", REFUSED if name in never_traced else TRACED)
    attention, inputs = (ast.literal_eval(values[name]) for name in ("PAGED_ATTENTION", "PAGED_ATTENTION_INPUTS"))
    found[attention] = GraphContractOperation("attention", REFUSED, [*inputs])
    for name, (parameters, _) in ast.literal_eval(values["_COLLECTIVES"]).items():
        found[name] = GraphContractOperation("collective", UNUSED, [*parameters])
    found.update(_array_operations())
    return dict(sorted(found.items()))


def read_graph_capabilities() -> dict[str, str]:
    """The fields of Capabilities that GraphPlatform sets for every platform, with their values as written."""
    for node in ast.walk(parse_module(PLATFORM)):
        match node:
            case ast.Call(func=ast.Name(id="Capabilities"), keywords=keywords):
                # Those that are read from the platform's attributes are the platform's own.
                own = [word for word in keywords if not any(isinstance(n, ast.Attribute) for n in ast.walk(word.value))]
                return {word.arg: ast.unparse(word.value) for word in own if word.arg is not None}
    raise AssertionError(f"{PLATFORM} has no capabilities")


def _array_operations() -> Iterator[tuple[str, GraphContractOperation]]:
    module = parse_module(ARRAY_OPERATIONS)
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(_values(module)["ARRAY_OPERATIONS"]):
        if isinstance(node, ast.Name) and node.id in functions:
            function = functions[node.id]
            returns = "" if function.returns is None else ast.unparse(function.returns)
            parameters = function_parameters(function.args)
            yield node.id, GraphContractOperation("array", REFUSED, parameters, returns)


def _values(module: ast.Module) -> dict[str, ast.expr]:
    """The values of a module's names, as expressions."""
    found: dict[str, ast.expr] = {}
    for node in module.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found[name] = value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                found[name] = value
    return found


def _strings(expression: ast.expr) -> set[str]:
    constants = (node.value for node in ast.walk(expression) if isinstance(node, ast.Constant))
    return {value for value in constants if isinstance(value, str)}

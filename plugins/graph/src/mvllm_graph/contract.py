"""This package's part of the platform contract, as data: the operations of graphs, and what GraphPlatform claims.

Core calls `read_contract` for `mvllm contract`. It is read from source, like the rest of the contract, since the
modules import torch and this one does not. A test compares the result with GRAPH_OPERATIONS.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from mvllm.extension_api.contract import (
    REFUSED,
    TRACED,
    UNUSED,
    GraphContractOperation,
    Operation,
    function_parameters,
    parse_module,
)

OPERATIONS = "mvllm_graph.operations"
ARRAY_OPERATIONS = "mvllm_graph.array_operations"
PLATFORM = "mvllm_graph.platform"


def read_contract(operations: Mapping[str, Operation]) -> tuple[dict[str, GraphContractOperation], dict[str, str]]:
    """The operations of graphs, and what GraphPlatform claims.

    Args:
        operations: The operations of models of core's contract.
    """
    return read_graph_operations(operations), read_graph_capabilities()


def read_graph_operations(operations: Mapping[str, Operation]) -> dict[str, GraphContractOperation]:
    """All operations of graphs, sorted by name.

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

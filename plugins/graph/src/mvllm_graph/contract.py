"""This package's part of the platform contract, as data: the operations of graphs, and what GraphPlatform claims.

mvllm-conformance reads it for `mvllm contract`. It is read from source, like the rest of the contract, since the
modules import torch and this one does not. A test compares the result with GRAPH_OPERATIONS.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

OPERATIONS = "mvllm_graph.operations"
ARRAY_OPERATIONS = "mvllm_graph.array_operations"
PLATFORM = "mvllm_graph.platform"


class ContractOperation(NamedTuple):
    """One operation of graphs.

    Attributes:
        group: As GraphOperation.group.
        if_left_out: What tracing does with an operation that a compiler does not name: `traced` as array operations of
            its definition; `refused`, with every model whose graphs have it; `unused`, since it occurs only if it is
            named.
        signature: `(x: Tensor, dim: int) -> Tensor`, with types where they are known; empty, `()`, for operations of
            models.
    """

    group: str
    if_left_out: Literal["traced", "refused", "unused"]
    signature: str = "()"


def read_graph_operations(operations: Collection[str], replacing: Collection[str]) -> dict[str, ContractOperation]:
    """All operations of graphs, sorted by name.

    Args:
        operations: Names of the operations of models in core's contract.
        replacing: Those of them that replace others if a platform has them (`OpSchema.replaces_others`).
    """
    values = _values(_parse(OPERATIONS))
    never_traced, absent, always_named, optional = (
        _strings(values[name]) for name in ("NEVER_TRACED", "_NOT_IN_GRAPHS", "_ALWAYS_NAMED", "_OPTIONAL")
    )
    found = {}
    for name in set(operations) - absent:
        if name in optional or (name in replacing and name not in always_named):
            found[name] = ContractOperation("optional", "unused")
        else:
            found[name] = ContractOperation("named", "refused" if name in never_traced else "traced")
    attention, inputs = (ast.literal_eval(values[name]) for name in ("PAGED_ATTENTION", "PAGED_ATTENTION_INPUTS"))
    found[attention] = ContractOperation("attention", "refused", f"({', '.join(inputs)})")
    for name, (parameters, _) in ast.literal_eval(values["_COLLECTIVES"]).items():
        found[name] = ContractOperation("collective", "unused", f"({', '.join(parameters)})")
    found.update(_array_operations())
    return dict(sorted(found.items()))


def read_graph_capabilities() -> dict[str, str]:
    """The fields of Capabilities that GraphPlatform sets for every platform, with their values as written."""
    for node in ast.walk(_parse(PLATFORM)):
        match node:
            case ast.Call(func=ast.Name(id="Capabilities"), keywords=keywords):
                # Those that are read from the platform's attributes are the platform's own.
                own = [word for word in keywords if not any(isinstance(n, ast.Attribute) for n in ast.walk(word.value))]
                return {word.arg: ast.unparse(word.value) for word in own if word.arg is not None}
    raise AssertionError(f"{PLATFORM} has no capabilities")


def _array_operations() -> Iterator[tuple[str, ContractOperation]]:
    module = _parse(ARRAY_OPERATIONS)
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(_values(module)["ARRAY_OPERATIONS"]):
        if isinstance(node, ast.Name) and node.id in functions:
            function = functions[node.id]
            returns = "" if function.returns is None else f" -> {ast.unparse(function.returns)}"
            yield node.id, ContractOperation("array", "refused", f"({ast.unparse(function.args)}){returns}")


def _parse(module: str) -> ast.Module:
    """The syntax tree of a module of this package, which is not imported."""
    found = importlib.util.find_spec(module)
    assert found is not None and found.origin is not None, module
    return ast.parse(Path(found.origin).read_text("utf-8"))


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

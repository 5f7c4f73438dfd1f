"""The operations that a platform may replace, as data: signature, shapes and dtypes, facts, overwritable parameters.

Read from the source of `mvllm.ops`, like the rest of the contract, since the references import torch and this module
does not. A test compares the result with the schemas that run.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from mvllm_conformance.source_parsing import function_parameters, parse_module

CATALOGUE = "mvllm.ops.all_schemas"
RETURNS = "returns"
"""Key of the result in `Operation.shapes`."""


@dataclass
class Operation:
    """Signature, shapes and facts of one operation.

    Attributes:
        summary: The first line of the reference's docstring.
        notes: The paragraphs between the first line and the parameters; may be empty.
        parameters: As written: `name: type = default`.
        type: Type of the result, as written.
        shapes: Shape, dtype and range by parameter, and under `returns` for the result. Empty if the summary has them.
        facts: Descriptions of `OpCase.facts` of the operation, by name.
        may_overwrite: Parameters whose storage the function may reuse.
        updates: Parameters that it writes in place, as a part of its result.
        replaces_others: Core calls it, in place of other operations, only if the platform has a provider of it.
    """

    summary: str
    notes: str = ""
    parameters: list[str] = field(default_factory=list)
    type: str = ""
    shapes: dict[str, str] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    may_overwrite: list[str] = field(default_factory=list)
    updates: list[str] = field(default_factory=list)
    replaces_others: bool = False

    def signature(self, name: str) -> str:
        """`name(parameters) -> type`."""
        return f"{name}({', '.join(self.parameters)}) -> {self.type}"


def read_operations() -> dict[str, Operation]:
    """All operations of this core, sorted by name."""
    catalogue = parse_module(CATALOGUE)
    homes = {
        node.module or ""
        for node in catalogue.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mvllm.ops.")
    }
    found: dict[str, Operation] = {}
    for home in sorted(homes - {"mvllm.ops.schema"}):
        found.update(_operations(parse_module(home)))
    return dict(sorted(found.items()))


def operation_lines(name: str, operation: Operation) -> list[str]:
    """The operation as lines of text."""
    lines = [f"operation {operation.signature(name)}", f"    {operation.summary}"]
    lines += [f"    {line}" for line in operation.notes.splitlines() if line]
    lines += [f"    {parameter}: {text}" for parameter, text in operation.shapes.items()]
    lines += [f"    fact {fact}: {text}" for fact, text in operation.facts.items()]
    if operation.may_overwrite:
        lines.append(f"    may overwrite: {', '.join(operation.may_overwrite)}")
    if operation.updates:
        lines.append(f"    updates: {', '.join(operation.updates)}")
    return lines


def _operations(module: ast.Module) -> Iterator[tuple[str, Operation]]:
    """The operations of one module: `OpSchema(function, facts=..., may_overwrite=...)`, also in a comprehension."""
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    values = {
        target.id: node.value
        for node in module.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for value in values.values():
        several: dict[str, list[str]] = {}
        for node in ast.walk(value):
            match node:
                case ast.comprehension(target=ast.Name(id=variable), iter=ast.Tuple(elts=items)):
                    several[variable] = [ast.unparse(item) for item in items]
        for node in ast.walk(value):
            match node:
                case ast.Call(func=ast.Name(id="OpSchema"), args=[ast.Name(id=function)], keywords=keywords):
                    arguments = {keyword.arg or "": _evaluate(keyword.value, values) for keyword in keywords}
                    for name in several.get(function, [function]):
                        yield name, _operation(functions[name], arguments)


def _operation(function: ast.FunctionDef, arguments: dict[str, object]) -> Operation:
    summary, notes, shapes = _describe(ast.get_docstring(function) or "")
    facts = arguments.get("facts", {})
    may_overwrite, updates = arguments.get("may_overwrite", ()), arguments.get("updates", ())
    assert isinstance(facts, dict), function.name
    assert isinstance(may_overwrite, tuple) and isinstance(updates, tuple), function.name
    return Operation(
        summary=summary,
        notes=notes,
        parameters=function_parameters(function.args),
        type=ast.unparse(function.returns) if function.returns is not None else "",
        shapes=shapes,
        facts=facts,
        may_overwrite=list(may_overwrite),
        updates=list(updates),
        replaces_others=arguments.get("replaces_others") is True,
    )


def _evaluate(expression: ast.expr, values: dict[str, ast.expr]) -> object:
    """The value of a literal that may refer to other literals of the module by name."""
    match expression:
        case ast.Name(id=name):
            return _evaluate(values[name], values)
        case ast.Dict(keys=keys, values=items):
            found: dict[object, object] = {}
            for key, item in zip(keys, items, strict=True):
                if key is None:  # **other
                    inner = _evaluate(item, values)
                    assert isinstance(inner, dict)
                    found.update(inner)
                else:
                    found[_evaluate(key, values)] = _evaluate(item, values)
            return found
    return ast.literal_eval(expression)


def _describe(docstring: str) -> tuple[str, str, dict[str, str]]:
    """Summary, notes and the shapes by parameter of a docstring with the sections `Args:` and `Returns:`."""
    text = inspect.cleandoc(docstring)
    head, *sections = re.split(r"^(Args|Returns):\n", text, flags=re.MULTILINE)
    summary, _, notes = head.strip().partition("\n")
    shapes: dict[str, str] = {}
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        lines = inspect.cleandoc("\n" + body)
        if title == "Returns":
            shapes[RETURNS] = _one_line(lines)
        else:
            shapes.update(_entries(lines))
    paragraphs = (part.strip("\n") for part in notes.split("\n\n") if part.strip())
    # An indented paragraph is a formula or a diagram and keeps its line breaks.
    kept = (part if part.startswith(" ") else _one_line(part) for part in paragraphs)
    return summary, "\n\n".join(kept), shapes


def _entries(lines: str) -> dict[str, str]:
    """`name: text` or `name, name: text` at the margin, continued by indented lines."""
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?=\S)", lines):
        names, _, text = entry.partition(": ")
        for name in names.split(", "):
            found[name] = _one_line(text)
    return found


def _one_line(text: str) -> str:
    return " ".join(text.split())

"""The platform contract as data: every name of `mvllm.plugin_api`, with members and phases.

The source is parsed, not imported, so the result needs no torch, is the same under every Python version, and shows
types and defaults as written. Marks (`mvllm.contract`) say what is optional, and in which phase core calls it. Function
bodies, docstrings and private members are not part of the contract.

The package mvllm-graph, as `mvllm.plugin_api.graph`, has a part of its own, which is read if it is installed.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from dataclasses import dataclass, field
from typing import Any

from mvllm.extension_api import contract
from mvllm.extension_api.contract import ENTRY_POINT_GROUP
from mvllm.plugin_api import CONTRACT
from mvllm_conformance.contract_operations import Operation, operation_lines, read_operations
from mvllm_conformance.source_parsing import function_parameters, parse_module, parse_signature

PLUGIN_API = "mvllm.plugin_api"
GRAPH_API = "mvllm_graph"
"""The package that `mvllm.plugin_api.graph` stands for."""

HOOKS = "mvllm.platform.hookspecs"

_OPEN_BASES = {"ABC", "Protocol"}
"""Plugins implement classes with one of these bases; core, or both, create objects of the others."""


@dataclass
class Member:
    """One member of a class, or a function.

    Attributes:
        kind: `method`, `classmethod`, `staticmethod`, `property`, `field`, `value` (of an enumeration), `attribute`,
            `function` or `constant`.
        parameters: As written, `self` and `cls` left out: `name: type = default`, with `*` before those by keyword.
        type: The type of a field or property, or of a method's result; empty if there is no annotation.
        default: The default of a field, or the value of a constant or an enumeration member; None if there is none.
        required: A plugin's class must implement it, or a caller must pass it.
        phase: When core calls it, from its mark or that of its class; may be empty.
    """

    kind: str
    parameters: list[str] = field(default_factory=list)
    type: str = ""
    default: str | None = None
    required: bool = False
    phase: str = ""


@dataclass
class Name:
    """One name of the contract.

    Attributes:
        kind: `class`, `dataclass`, `struct`, `enumeration`, `error`, `function` or `constant`.
        bases: As written.
        written_by_plugins: Plugins implement its methods and core calls them.
        phase: The phase of the class's mark.
        keyword_only: Fields are passed by keyword only, so their order does not matter.
        itself: A function's signature, or a constant's type and value.
        members: By name, in the order of the source; fields first come in the order of the constructor.
    """

    kind: str
    bases: list[str] = field(default_factory=list)
    written_by_plugins: bool = False
    phase: str = ""
    keyword_only: bool = False
    itself: Member | None = None
    members: dict[str, Member] = field(default_factory=dict)


TRACED = "traced"
REFUSED = "refused"


@dataclass
class GraphContractOperation:
    """One operation of StepGraphs.

    Attributes:
        group: As GraphOperation.group.
        if_left_out: What tracing does with an operation that a compiler does not name: TRACED as array operations of
            its definition; REFUSED, with every model whose graphs have it; or `unused`, since it occurs only if it is
            named.
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


@dataclass
class Surface:
    """The whole contract.

    Attributes:
        contract: Its version.
        entry_points: The group in which plugins are found.
        hooks: Hooks of a plugin's hook module.
        names: All names of `mvllm.plugin_api`, and of `mvllm.plugin_api.graph` if it is installed, sorted.
        operations: Operations that `OpProvider`s replace, sorted; empty in files of an older core.
        graph_operations: Operations of StepGraphs, sorted; empty without the package, and in files of an older core.
        graph_capabilities: What `GraphPlatform` claims for every platform; likewise.
    """

    contract: tuple[int, int]
    entry_points: str
    hooks: dict[str, Member]
    names: dict[str, Name]
    operations: dict[str, Operation] = field(default_factory=dict)
    graph_operations: dict[str, GraphContractOperation] = field(default_factory=dict)
    graph_capabilities: dict[str, str] = field(default_factory=dict)


def read_surface(*, with_graphs: bool = True) -> Surface:
    """The contract of this core, from its source.

    Args:
        with_graphs: Read the part of graphs as well, if it is installed.
    """
    names = _names_of(PLUGIN_API)
    # Without its value, since a change of the version is not a change of the contract's content.
    names["CONTRACT"] = Name("constant", itself=Member("constant", type="tuple[int, int]"))
    hooks = {
        node.name: _function(node, "function", "")
        for node in parse_module(HOOKS).body
        if isinstance(node, ast.FunctionDef) and "hookspec" in _decorators(node)
    }
    operations = read_operations()
    graph_operations: dict[str, GraphContractOperation] = {}
    graph_capabilities: dict[str, str] = {}
    if with_graphs and importlib.util.find_spec(GRAPH_API) is not None:
        from mvllm_graph.contract import read_graph_capabilities, read_graph_operations

        names = dict(sorted({**_names_of(GRAPH_API), **names}.items()))
        replacing = {name for name, operation in operations.items() if operation.replaces_others}
        for name, facts in read_graph_operations(set(operations), replacing).items():
            signature = parse_signature(facts.signature)
            graph_operations[name] = GraphContractOperation(facts.group, facts.if_left_out, *signature)
        graph_capabilities = read_graph_capabilities()
    return Surface(CONTRACT, ENTRY_POINT_GROUP, hooks, names, operations, graph_operations, graph_capabilities)


def as_text(surface: Surface) -> str:
    """The contract as text: a line per member, in the order of the source."""
    lines = [f"contract {surface.contract[0]}.{surface.contract[1]}", f"entry points {surface.entry_points}"]
    lines += ["", *(f"hook {name}{_signature(hook)}" for name, hook in surface.hooks.items())]
    for name, entry in surface.names.items():
        if entry.itself is not None:
            lines += ["", f"{entry.kind} {name}{_signature(entry.itself)}"]
            continue
        bases = f"({', '.join(entry.bases)})" if entry.bases else ""
        by_plugins = ", written by plugins" if entry.written_by_plugins else ""
        phase = f"  # {entry.phase}{by_plugins}" if entry.phase else ""
        lines += ["", f"{entry.kind} {name}{bases}{phase}"]
        for member, facts in entry.members.items():
            needed = "required " if facts.required else ""
            when = f"  # {facts.phase}" if facts.phase and facts.phase != entry.phase else ""
            lines.append(f"    {needed}{facts.kind} {member}{_signature(facts)}{when}")
    for name, operation in surface.operations.items():
        lines += ["", *operation_lines(name, operation)]
    lines += ["", *(operation.line(name) for name, operation in surface.graph_operations.items())]
    lines += ["", *(f"graph capability {name} = {value}" for name, value in surface.graph_capabilities.items())]
    return "\n".join(lines)


def as_data(surface: Surface) -> dict[str, Any]:
    """The contract as JSON data, without empty values."""
    return {
        "contract": f"{surface.contract[0]}.{surface.contract[1]}",
        "entry_points": surface.entry_points,
        "hooks": {name: _member_data(hook) for name, hook in surface.hooks.items()},
        "names": {name: _name_data(entry) for name, entry in surface.names.items()},
        "operations": {name: _filled(operation) for name, operation in surface.operations.items()},
        "graph_operations": {name: _filled(operation) for name, operation in surface.graph_operations.items()},
        "graph_capabilities": surface.graph_capabilities,
    }


def from_data(data: dict[str, Any]) -> Surface:
    """The contract from the result of `as_data`.

    Raises:
        KeyError, TypeError, ValueError: The data have another format.
    """
    major, minor = (int(part) for part in data["contract"].split("."))
    names = {}
    for name, facts in data["names"].items():
        members = {member: Member(**values) for member, values in facts.get("members", {}).items()}
        itself = Member(**facts["itself"]) if "itself" in facts else None
        names[name] = Name(**{**facts, "itself": itself, "members": members})
    hooks = {name: Member(**values) for name, values in data["hooks"].items()}
    operations = {name: Operation(**facts) for name, facts in data.get("operations", {}).items()}
    graph = {name: GraphContractOperation(**facts) for name, facts in data.get("graph_operations", {}).items()}
    claimed = dict(data.get("graph_capabilities", {}))
    return Surface((major, minor), data["entry_points"], hooks, names, operations, graph, claimed)


def _member_data(member: Member) -> dict[str, Any]:
    return _filled(member)


def _name_data(entry: Name) -> dict[str, Any]:
    data = _filled(entry)
    if entry.itself is not None:
        data["itself"] = _member_data(entry.itself)
    if entry.members:
        data["members"] = {name: _member_data(member) for name, member in entry.members.items()}
    return data


def _filled(entry: Member | Name | Operation | GraphContractOperation) -> dict[str, Any]:
    return {key: value for key, value in vars(entry).items() if value not in (None, "", [], {}, False)}


def _signature(member: Member) -> str:
    if member.kind in ("method", "classmethod", "staticmethod", "function"):
        return f"({', '.join(member.parameters)})" + (f" -> {member.type}" if member.type else "")
    text = f": {member.type}" if member.type else ""
    return text + (f" = {member.default}" if member.default is not None else "")


# --- reading the source


def _names_of(module: str) -> dict[str, Name]:
    """The names that a module exports, sorted."""
    trees: dict[str, ast.Module] = {}
    return {name: _defined(name, module, trees) for name in sorted(_exported(parse_module(module)))}


def _defined(name: str, module: str, trees: dict[str, ast.Module]) -> Name:
    """A name of a module, from the module that it is imported from.

    Args:
        trees: Modules that are parsed already; is added to.
    """
    if module not in trees:
        trees[module] = parse_module(module)
    for node in ast.walk(trees[module]):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return _defined(alias.name, node.module, trees)
    return _name(name, trees[module])


def _exported(plugin_api: ast.Module) -> list[str]:
    for node in plugin_api.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                names: list[str] = ast.literal_eval(value)
                return names
    raise AssertionError("a module of the contract has no __all__")


def _name(name: str, tree: ast.Module) -> Name:
    for node in tree.body:
        match node:
            case ast.ClassDef() if node.name == name:
                return _class(node)
            case ast.FunctionDef() if node.name == name:
                return Name("function", itself=_function(node, "function", ""))
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                return Name("constant", itself=Member("constant", default=ast.unparse(value)))
            case ast.AnnAssign(target=ast.Name(id=target), annotation=annotation, value=ast.expr() as value):
                if target == name:
                    return Name("constant", itself=Member("constant", [], ast.unparse(annotation), ast.unparse(value)))
    raise AssertionError(f"{name} is neither a class, a function nor a value of its module")


def _class(node: ast.ClassDef) -> Name:
    bases = [ast.unparse(base) for base in node.bases]
    kind = _kind(node, bases)
    keyword_only = any(word.arg == "kw_only" and ast.unparse(word.value) == "True" for word in node.keywords)
    entry = Name(kind, bases, bool(_OPEN_BASES & set(bases)), _phase(node), keyword_only)
    fields = kind in ("dataclass", "struct")
    for item in node.body:
        match item:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=value) if not _private(name):
                default = None if value is None else ast.unparse(value)
                needed = default is None and (fields or entry.written_by_plugins)
                member = "field" if fields else "attribute"
                entry.members[name] = Member(member, [], ast.unparse(annotation), default, needed)
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if not _private(name):
                member = "value" if kind == "enumeration" else "attribute"
                entry.members[name] = Member(member, default=ast.unparse(value))
            case ast.FunctionDef(name=name) if name == "__init__" or not _private(name):
                entry.members[name] = _function(item, "method", entry.phase)
                # Methods of a protocol are required unless marked; those of an ABC only if abstract.
                entry.members[name].required |= "Protocol" in bases and "optional" not in _decorators(item)
            case _:
                pass
    # As GraphPlatform, which implements most of Platform.
    entry.written_by_plugins |= any(member.required for member in entry.members.values() if member.kind == "method")
    return entry


def _kind(node: ast.ClassDef, bases: list[str]) -> str:
    if any("dataclass" in decorator for decorator in _decorators(node)):
        return "dataclass"
    if any(base.endswith("Struct") for base in bases):
        return "struct"
    if any(re.search(r"Enum$", base) for base in bases):
        return "enumeration"
    return "error" if any(re.search(r"(Error|Exception)$", base) for base in bases) else "class"


def _function(node: ast.FunctionDef, kind: str, phase: str) -> Member:
    decorators = _decorators(node)
    for special in ("classmethod", "staticmethod", "property"):
        if special in decorators:
            kind = special
    parameters = function_parameters(node.args)
    if kind in ("method", "classmethod", "property"):
        parameters = parameters[1:]
    returns = ast.unparse(node.returns) if node.returns is not None else ""
    return Member(kind, parameters, returns, None, "abstractmethod" in decorators, _phase(node) or phase)


def _decorators(node: ast.ClassDef | ast.FunctionDef) -> list[str]:
    return [ast.unparse(decorator) for decorator in node.decorator_list]


def _phase(node: ast.ClassDef | ast.FunctionDef) -> str:
    """`@phase(Phase.FRONTEND, Phase.ENGINE)` -> `frontend or engine`; empty without this mark."""
    for decorator in node.decorator_list:
        match decorator:
            case ast.Call(func=ast.Name(id="phase"), args=when):
                return " or ".join(_phase_name(each) for each in when)
    return ""


def _phase_name(node: ast.expr) -> str:
    match node:
        case ast.Attribute(value=ast.Name(id="Phase"), attr=name):
            return contract.Phase[name].value
        case ast.Name(id=name) if isinstance(constant := getattr(contract, name, None), str):
            return constant
    raise AssertionError(f"a mark of a phase names {ast.unparse(node)}")


def _private(name: str) -> bool:
    return name.startswith("_")

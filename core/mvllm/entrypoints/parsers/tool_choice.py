"""A request's `tools` and `tool_choice`, and the JSON schema that enforces a choice.

`none` and `auto` leave the output free text; with a strict function, `structural_tag` constrains the calls in it.
`required` and `named` constrain all of it: structured output with the JSON schema of `schema` replaces the model's own
tool call format, and `stream` parses that JSON:

    required    [{"name": "get_weather", "arguments": {"city": "Paris"}}, ...]
    named       {"city": "Paris"}                                               the arguments alone

With a reasoning parser the grammar applies after the reasoning (`OutputParserStream.in_reasoning`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mvllm.entrypoints.parsers.interface import ToolParser, ToolStream
from mvllm.entrypoints.parsers.marked_calls import MarkedCalls
from mvllm.errors import RequestError
from mvllm.messages.structured_outputs import MAX_TAGS, check_json_size
from mvllm.structured_output.additional_properties import STRICT_KEY, close_all_objects

Mode = Literal["none", "auto", "required", "named"]

_NAME = re.compile(r"[A-Za-z0-9_.:\-]{1,128}")
_MAPS_OF_SCHEMAS = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
_DATA = frozenset({"const", "enum", "default", "examples"})


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """A validated tool choice.

    Attributes:
        mode: `none`, `auto`, `required` (at least one call) or `named` (one call of one function).
        tools: The request's tools, unchanged.
        name: The function to call, for `named`.
        parallel: Whether several calls are allowed.
    """

    mode: Mode
    tools: tuple[Mapping[str, Any], ...] = ()
    name: str | None = None
    parallel: bool = True

    @property
    def is_constrained(self) -> bool:
        """Whether the output must follow `schema`."""
        return self.mode in ("required", "named")

    def schema(self) -> dict[str, Any] | None:
        """The JSON schema of the output; None for an unconstrained choice.

        References in a function's parameters are rebased.
        """
        if self.mode == "named":
            [function] = [f for f in map(_function, self.tools) if f["name"] == self.name]
            return _closed_parameters(function)
        if self.mode != "required":
            return None
        functions = [_function(tool) for tool in self.tools]
        schema: dict[str, Any] = {
            "type": "array",
            "minItems": 1,
            "items": {"anyOf": [_call_schema(i, function) for i, function in enumerate(functions)]},
            "$defs": {
                str(i): _rebase_references(_closed_parameters(f), f"#/$defs/{i}") for i, f in enumerate(functions)
            },
        }
        if not self.parallel:
            schema["maxItems"] = 1
        return schema

    def structural_tag(self, parser: ToolParser) -> dict[str, Any] | None:
        """The structural tag of free text with calls in the parser's format, for `auto` with a strict function.

        None for another choice, without a strict function, for more functions than a tag may have, or if no grammar can
        constrain the format.
        """
        functions = [_function(tool) for tool in self.tools]
        if self.mode != "auto" or not any(function.get("strict") for function in functions):
            return None
        structures: list[dict[str, Any]] = []
        triggers: set[str] = set()
        special: set[str] = set()
        for function in functions:
            schema = _closed_parameters(function)
            for syntax in parser.call_syntax(function["name"]):
                structure = {"begin": syntax.begin, "schema": schema, "end": syntax.end}
                if syntax.style != "json":
                    structure |= {"style": syntax.style, "separator": syntax.separator}
                structures.append(structure)
                triggers.add(syntax.trigger)
                special |= set(syntax.special_tokens)
        if not 0 < len(structures) <= MAX_TAGS:
            return None
        return {"structures": structures, "triggers": sorted(triggers), "special_tokens": sorted(special)}

    def stream(self) -> ToolStream | None:
        """An incremental parser for output that follows `schema`; None for an unconstrained choice."""
        if self.mode == "named":
            return _NamedCall(self.name or "")
        return _RequiredCalls() if self.mode == "required" else None


def parse_tool_choice(
    tools: Sequence[Mapping[str, Any]] | None, tool_choice: object = None, *, parallel: bool | None = None
) -> ToolChoice:
    """Validates a request's `tools`, `tool_choice` (by default `auto`) and `parallel_tool_calls`.

    Raises:
        RequestError: A field is not valid in the chat completions API, or they contradict each other.
    """
    checked = _check_tools(tools)
    parallel = parallel is not False
    if not checked:
        if tool_choice in (None, "none", "auto"):
            return ToolChoice("none", parallel=parallel)
        raise RequestError("tool_choice requires a call, but the request has no tools.", parameter="tool_choice")
    if tool_choice is None:
        return ToolChoice("auto", checked, parallel=parallel)
    if tool_choice in ("none", "auto", "required"):
        mode: Mode = "none" if tool_choice == "none" else "auto" if tool_choice == "auto" else "required"
        return ToolChoice(mode, checked, parallel=parallel)
    name = _chosen_name(tool_choice)
    known = [_function(tool)["name"] for tool in checked]
    if name not in known:
        raise RequestError(
            f"tool_choice names the function {name!r}, which is none of tools: {', '.join(known)}.",
            parameter="tool_choice",
        )
    return ToolChoice("named", checked, name, parallel=False)


class _RequiredCalls(MarkedCalls):
    """Parser of a JSON list of calls."""

    def __init__(self) -> None:
        super().__init__("")
        self._markers = ()
        self.open("")


class _NamedCall(MarkedCalls):
    """Parser of the arguments of one call."""

    def __init__(self, name: str) -> None:
        super().__init__("", bare=False)
        self._markers = ()
        self.read_arguments(name)


def _check_tools(tools: object) -> tuple[Mapping[str, Any], ...]:
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise RequestError(f"tools must be a list; found a {type(tools).__name__}.", parameter="tools")
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if not isinstance(tool, Mapping) or (tool.get("type") or "function") != "function":
            raise RequestError(
                f'{where} must be an object with "type": "function"; other tools are not supported.', parameter="tools"
            )
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise RequestError(f"{where}.function must be an object.", parameter="tools")
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise RequestError(
                f"{where}.function.name must be up to 128 letters, digits, '_', '-', '.' or ':'; found {name!r:.200}.",
                parameter="tools",
            )
        if name in seen:
            raise RequestError(f"{where}.function.name: there is another function {name!r}.", parameter="tools")
        seen.add(name)
        if not isinstance(function.get("parameters"), Mapping | None):
            raise RequestError(f"{where}.function.parameters must be a JSON schema, an object.", parameter="tools")
        if not isinstance(function.get("description"), str | None):
            raise RequestError(f"{where}.function.description must be a text.", parameter="tools")
        if not isinstance(function.get("strict"), bool | None):
            raise RequestError(f"{where}.function.strict must be true or false.", parameter="tools")
        if function.get("strict"):
            _check_strict(where, function)
    return tuple(tools)


def _chosen_name(choice: object) -> str:
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str):
            return name
    raise RequestError(
        'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}; '
        f"found {choice!r:.200}.",
        parameter="tool_choice",
    )


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function: Mapping[str, Any] = tool["function"]
    return function


def _check_strict(where: str, function: Mapping[str, Any]) -> None:
    """Checks that all objects of the parameters can be closed (`additionalProperties` false)."""
    try:
        check_json_size(function.get("parameters"))
        close_all_objects(_parameters(function), f"{where}.function.strict")
    except RequestError as e:
        raise RequestError(str(e), parameter="tools") from e


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    return function.get("parameters") or {"type": "object", "properties": {}}


def _closed_parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    if function.get("strict"):
        return {**close_all_objects(_parameters(function), "strict"), STRICT_KEY: True}
    return dict(_parameters(function))


def _call_schema(i: int, function: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": {"$ref": f"#/$defs/{i}"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _rebase_references(schema: Mapping[str, Any], root: str) -> dict[str, Any]:
    """A copy of a schema in which local references begin with `root`. Not recursive."""
    top: dict[str, Any] = {}
    # (container of the copy, key in it, value to copy, whether the value maps names to schemas)
    work: list[tuple[Any, Any, Any, bool]] = [({"top": top}, None, schema, False)]
    while work:
        target, key, value, is_map = work.pop()
        if isinstance(value, Mapping):
            copy: Any = top if key is None else {}
            for name, inner in value.items():
                if not is_map and name == "$ref" and isinstance(inner, str) and inner.startswith("#"):
                    copy[name] = root + inner[1:]
                elif not is_map and name in _DATA:
                    copy[name] = inner
                else:
                    copy[name] = None  # keeps the order
                    work.append((copy, name, inner, not is_map and name in _MAPS_OF_SCHEMAS))
        elif isinstance(value, list):
            copy = [None] * len(value)
            work += [(copy, i, inner, False) for i, inner in enumerate(value)]
        else:
            copy = value
        if key is not None:
            target[key] = copy
    return top

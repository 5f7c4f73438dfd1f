"""Converts the text of an argument to JSON by the function's schema, for formats that write strings without quotes.

    <parameter=days>3</parameter>     {"type": "integer"}   3
    <parameter=zip>01234</parameter>  {"type": "string"}    "01234"

With several types, the text is the first of these that it is written like: a string of an enum, null, a boolean, a
number, an object or an array, a string. Without a declared type it is JSON if it is valid JSON, else a string; so is
text of a wrong type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from mvllm.extension_api.parsers import JsonValueReader

Types = frozenset[str]
"""Names of JSON Schema's types; empty if unknown."""

STRING: Types = frozenset({"string"})

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WHOLE = re.compile(r"(-?(?:0|[1-9][0-9]*))\.0+")
_MAX_SCHEMAS = 64
_JSON_TYPES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "array",
    "dict": "object",
    "NoneType": "null",
}
"""JSON Schema's names of Python's types, which schemas contain by mistake, too."""


class ArgumentTypes:
    """The types of a function's arguments.

    Args:
        tools: The request's tools.
        name: The function's name; one that no tool has has arguments of unknown types.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]], name: str) -> None:
        self._parameters: Mapping[str, Any] = {}
        for tool in tools:
            function = tool.get("function")
            if isinstance(function, Mapping) and function.get("name") == name:
                parameters = function.get("parameters")
                self._parameters = parameters if isinstance(parameters, Mapping) else {}

    @property
    def only_key(self) -> str | None:
        """The name of the argument if the function has exactly one."""
        properties = self._parameters.get("properties")
        return next(iter(properties)) if isinstance(properties, Mapping) and len(properties) == 1 else None

    def of(self, key: str) -> Types:
        """The types of an argument."""
        return types_of(self._schema(key), self._parameters)

    def strings_of(self, key: str) -> frozenset[str]:
        """The strings that an argument's schema lists as values."""
        found: set[str] = set()
        for one in _alternatives(self._schema(key), self._parameters):
            values = one.get("enum")
            listed = [*(values if isinstance(values, list) else ()), one.get("const")]
            found |= {value for value in listed if isinstance(value, str)}
        return frozenset(found)

    def _schema(self, key: str) -> object:
        properties = self._parameters.get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        return self._parameters.get("additionalProperties") if schema is None else schema


def types_of(schema: object, root: Mapping[str, Any]) -> Types:
    """The types that a schema allows, as far as it says so; empty if unknown.

    Args:
        root: The schema to which `$ref` refers.
    """
    found: set[str] = set()
    for one in _alternatives(schema, root):
        kind = one.get("type")
        if kind is not None:
            names = kind if isinstance(kind, list) else [kind]
            found |= {_JSON_TYPES.get(name, name) for name in names if isinstance(name, str)}
        elif isinstance(one.get("enum"), list):
            found |= {_JSON_TYPES.get(type(value).__name__, "string") for value in one["enum"]}
        elif "const" in one:
            found.add(_JSON_TYPES.get(type(one["const"]).__name__, "string"))
    return frozenset(found)


def _alternatives(schema: object, root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The schemas that say the type of a value: the schema, what it refers to, or its alternatives. At most 64."""
    work = [schema]
    for _ in range(_MAX_SCHEMAS):
        if not work:
            return
        one = work.pop()
        if not isinstance(one, Mapping):
            continue
        yield one
        if one.get("type") is not None or isinstance(one.get("enum"), list) or "const" in one:
            continue
        if isinstance(one.get("$ref"), str):
            work.append(_resolve(one["$ref"], root))
            continue
        for key in ("anyOf", "oneOf", "allOf"):
            members = one.get(key)
            work += members[:_MAX_SCHEMAS] if isinstance(members, list) else []


def to_json(text: str, types: Types, strings: frozenset[str] = frozenset()) -> str:
    """The JSON text of an argument.

    Args:
        strings: Texts that are strings, whatever else they are written like.
    """
    if types == STRING:
        return quote(text)
    if text.strip() in strings:
        return quote(text.strip())
    stripped = text.strip()
    word = stripped.lower()
    if "null" in types and word in ("null", "none"):
        return "null"
    if "boolean" in types and word in ("true", "false"):
        return word
    if "integer" in types and (whole := _WHOLE.fullmatch(stripped)):
        return stripped if "number" in types else whole.group(1)
    if types & {"integer", "number"} and _NUMBER.fullmatch(stripped):
        return stripped
    if types & {"object", "array"} and stripped[:1] in ("{", "[") and (found := as_json(stripped)) is not None:
        return found
    if "string" in types:
        return quote(text)
    found = as_json(stripped)
    return quote(text) if found is None else found


def as_json(text: str) -> str | None:
    """A text that is valid JSON, or JSON with Python's spellings, as JSON; None for any other."""
    if _is_json(text):
        return text
    if not text:
        return None
    reader = JsonValueReader()
    pieces: list[str] = []
    if reader.feed(text, 0, pieces) < len(text):
        return None
    reader.finish(pieces)
    converted = "".join(pieces)
    converted = {"None": "null", "True": "true", "False": "false"}.get(converted, converted)
    return converted if _is_json(converted) else None


def quote(text: str) -> str:
    """The JSON string of a text."""
    return json.dumps(text, ensure_ascii=False)


def escape(text: str) -> str:
    """The JSON string of a text, without its quotes."""
    return quote(text)[1:-1]


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _resolve(reference: str, root: Mapping[str, Any]) -> object:
    """The schema of a local reference; None if there is none."""
    found: object = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if part and not (isinstance(found, Mapping) and key in found):
            return None
        if part:
            assert isinstance(found, Mapping)
            found = found[key]
    return found

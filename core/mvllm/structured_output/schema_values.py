"""What can be said about JSON schemas without the grammar library: their types, their values, whether they overlap."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

TYPES = ("null", "boolean", "number", "string", "array", "object")
ANNOTATIONS = frozenset(
    {"title", "description", "$comment", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"}
)
_OF_VALUES = ANNOTATIONS | {"const", "enum", "type"}


def disjoint(a: Any, b: Any) -> bool:
    """Whether two schemas surely have no common value."""
    if a is False or b is False:
        return True
    if not isinstance(a, dict) or not isinstance(b, dict):
        return False
    if not _overlapping_types(types_of(a), types_of(b)):
        return True
    if _disjoint_values(a, b):
        return True
    if types_of(a) != ("object",) or types_of(b) != ("object",):
        return False
    first, second = a.get("properties"), b.get("properties")
    if not isinstance(first, dict) or not isinstance(second, dict):
        return False
    required = {*strings_of(a.get("required")), *strings_of(b.get("required"))}
    return any(
        name in required and _disjoint_values(first[name], second[name]) for name in first.keys() & second.keys()
    )


def _disjoint_values(a: Any, b: Any) -> bool:
    first, second = finite_values(a), finite_values(b)
    if first is None or second is None:
        return False
    return not {canonical(value) for value in first} & {canonical(value) for value in second}


def _overlapping_types(a: tuple[str, ...], b: tuple[str, ...]) -> bool:
    numbers = {"integer", "number"}
    return bool(set(a) & set(b) or (numbers & set(a) and numbers & set(b)))


def types_of(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """The types that a schema names, or those of its values; all types without."""
    kind = schema.get("type")
    if isinstance(kind, str):
        return (kind,)
    if isinstance(kind, list):
        return tuple(str(each) for each in kind)
    values = (
        schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else None
    )
    return TYPES if values is None else tuple(sorted({_type_of(value) for value in values}))


def other_types(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Values of the types that a schema of types excludes; None if that takes integers from numbers."""
    gone = set(types_of(schema))
    left = [kind for kind in TYPES if kind not in gone]
    return {"type": left} if "integer" not in gone or "number" in gone else None


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def finite_values(schema: Any) -> list[Any] | None:
    """The values of a schema that lists them; None for any other."""
    if not isinstance(schema, dict):
        return None
    if not schema.keys() <= _OF_VALUES:
        return None
    if "const" in schema:
        values = [schema["const"]]
    elif isinstance(schema.get("enum"), list):
        values = list({canonical(value): value for value in schema["enum"]}.values())
    else:
        return [False, True] if schema.get("type") == "boolean" else None
    kinds = types_of(schema) if "type" in schema else TYPES
    if "integer" in kinds and "number" not in kinds:
        return [value for value in values if _type_of(value) in kinds or _is_integer(value)]
    return [value for value in values if _type_of(value) in kinds]


def _is_integer(value: Any) -> bool:
    return not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))


def canonical(value: Any) -> str:
    """A text that is equal for values that JSON Schema counts as equal."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def is_regex(pattern: object) -> bool:
    """Whether a pattern is valid, for those that the grammar library refuses: it has no look-around, for example."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return isinstance(pattern, str) and re.compile(pattern) is not None
    except (re.error, RecursionError, OverflowError):
        return False


def count_of(value: Any, default: int) -> int:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else default


def strings_of(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def escape_key(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def reference_targets(root: Any) -> frozenset[str]:
    """The local references anywhere in a schema."""
    found: set[str] = set()
    waiting: list[Any] = [root]
    while waiting:
        value = waiting.pop()
        inner: Iterable[Any] = ()
        if isinstance(value, dict):
            if isinstance(reference := value.get("$ref"), str) and reference.startswith("#/"):
                found.add(unquote(reference))
            inner = value.values()
        elif isinstance(value, list):
            inner = value
        waiting += (each for each in inner if isinstance(each, dict | list))
    return frozenset(found)

"""Subschemas of a JSON schema, and closing of objects (`additionalProperties: false`).

JSON Schema leaves objects open: any key may come besides the declared ones. Nobody reads keys that a schema does not
declare, and a small model adds them without end, so objects that declare properties are closed unless the schema has a
rule for other keys.

Where a schema combines several parts that declare properties (`allOf`, `properties` beside `anyOf`, `properties` beside
`$ref`), each closed part would forbid the keys of the others, so the combination is closed as a whole:

    {"allOf": [{"$ref": "#/$defs/base"}, {"properties": {"b": ...}}]}       base declares a
    -> {..., "properties": {"a": true, "b": true}, "additionalProperties": false}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from mvllm.errors import RequestError

STRICT_KEY = "x-mvllm-strict"
"""Key of a schema in which every keyword has to be enforced: a relaxation below it is an error."""

_OPEN_OBJECT_KEYS = ("additionalProperties", "unevaluatedProperties")
_KEYS_OF_OTHERS = (*_OPEN_OBJECT_KEYS, "patternProperties", "propertyNames")
_MAPS_OF_SCHEMAS = (
    "properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"
)  # fmt: skip
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")  # before 2020-12 `items` could be a list
_SCHEMAS = (
    "items", "additionalItems", "contains", "additionalProperties", "not", "if", "then", "else", "propertyNames",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_TESTS = ("not", "if", "contains")
"""A closed object in these would forbid or require other values than before."""

_Schema = dict[str, Any]


def close_declared_objects(schema: Mapping[str, Any]) -> _Schema:
    """A copy in which objects that declare `properties` and no rule for other keys are closed.

    A combination of objects is closed around the properties of all its parts. Unchanged are: objects with rules for
    other keys (`additionalProperties`, `patternProperties`, ...), and objects that require a key which they do not
    declare, or more keys than that, because no value would satisfy them once closed.

    Args:
        schema: JSON.
    """
    parts = _Subschemas(schema, declares=_has_properties)
    combinations = parts.combinations()
    combined = parts.ids_within(combinations)
    inner = parts.ids_within([each for part in combinations for each in parts.applied_subschemas(part)])
    for part in parts:
        if id(part) in combined:
            continue
        if _has_properties(part) and not _allows_other_keys(part, part["properties"]):
            part["additionalProperties"] = False
    for part in combinations:
        if id(part) not in inner:
            parts.close_combination(part)
    return parts.root


def close_all_objects(schema: Mapping[str, Any], name: str) -> _Schema:
    """A copy in which every object is closed, as `strict` requires.

    Args:
        schema: JSON.
        name: The setting that requires it, for errors.

    Raises:
        RequestError: An object is explicitly open, or several parts of a combination declare properties.
    """
    parts = _Subschemas(schema, declares=_is_object)
    for part in filter(_is_object, parts):
        for key in _OPEN_OBJECT_KEYS:
            if part.get(key, False) is not False:
                raise RequestError(
                    f"{name} is true, so every object must be closed, but {parts.pointer(part)} has {key} "
                    f"{_format_value(part[key])}. Send {key} false or leave it out, or send strict false."
                )
    for part in parts.combinations():
        raise RequestError(
            f"{name} is true, so every object must be closed, but {parts.pointer(part)} combines several objects. "
            "Declare all properties in one of them, or send strict false."
        )
    for part in filter(_is_object, parts):
        part["additionalProperties"] = False
    return parts.root


def subschemas(schema: object) -> list[tuple[str, _Schema]]:
    """The schemas directly within a schema, each with its JSON pointer relative to it."""
    found: list[tuple[str, object]] = []
    if isinstance(schema, dict):
        for key in _MAPS_OF_SCHEMAS:
            if isinstance(inner := schema.get(key), dict):
                found += [(f"{key}/{name}", each) for name, each in inner.items()]
        for key in _LISTS_OF_SCHEMAS:
            if isinstance(inner := schema.get(key), list):
                found += [(f"{key}/{i}", each) for i, each in enumerate(inner)]
        found += [(key, schema.get(key)) for key in _SCHEMAS]
    return [(path, each) for path, each in found if isinstance(each, dict)]


def _format_value(value: object) -> str:
    return json.dumps(value) if isinstance(value, bool | int | str | None) else "a schema"


def _has_properties(part: _Schema) -> bool:
    return isinstance(part.get("properties"), dict)


def _allows_other_keys(part: _Schema, names: Mapping[str, object]) -> bool:
    """Whether a schema has a rule for keys that are not among `names`, or needs such keys."""
    least, rules = part.get("minProperties"), [part.get("dependentRequired"), part.get("dependencies")]
    required = [part.get("required"), *(rule for each in rules if isinstance(each, dict) for rule in each.values())]
    if any(str(key) not in names for keys in required if isinstance(keys, list) for key in keys):
        return True
    return any(key in part for key in _KEYS_OF_OTHERS) or (isinstance(least, int) and least > len(names))


def _is_object(part: _Schema) -> bool:
    kind = part.get("type")
    return kind == "object" or (isinstance(kind, list) and "object" in kind) or _has_properties(part)


class _Subschemas:
    """The schemas within a copy of a schema: the root, nested schemas, and targets of references within the root.

    Args:
        schema: JSON.
        declares: Whether a schema declares properties by itself.

    Attributes:
        root: The copy.
    """

    root: _Schema

    def __init__(self, schema: Mapping[str, Any], declares: Callable[[_Schema], bool]) -> None:
        self.root = _copy(schema)
        self._declares = declares
        self._parts: dict[int, _Schema] = {}
        self._places: dict[int, tuple[int, str]] = {}  # schema -> its parent, and the path from there
        self._targets: dict[int, _Schema] = {}  # schema -> target of its $ref
        waiting: list[tuple[int, str, _Schema]] = [(0, "#", self.root)]
        while waiting:
            outer, path, part = waiting.pop()
            if id(part) in self._parts:
                continue
            self._parts[id(part)] = part
            self._places[id(part)] = outer, path
            waiting += ((id(part), path, inner) for path, inner in subschemas(part) if path not in _TESTS)
            target = resolve_reference(self.root, part.get("$ref"))
            if target is not None:
                self._targets[id(part)] = target
                waiting.append((0, part["$ref"], target))

    def __iter__(self) -> Iterator[_Schema]:
        return iter(self._parts.values())

    def pointer(self, part: _Schema) -> str:
        """JSON pointer of a part, for errors."""
        outer, place = self._places[id(part)]
        while outer:
            outer, path = self._places[outer]
            place = f"{path}/{place}"
        return place if len(place) <= 200 else f"{place[:100]}...{place[-100:]}"

    def combinations(self) -> list[_Schema]:
        """The schemas in which several parts declare properties of the same object."""
        declaring = self._ids_declaring()
        found = []
        for part in self:
            groups = [*([each] for each in _schemas(part, "allOf")), _schemas(part, "anyOf"), _schemas(part, "oneOf")]
            groups += [self._target(part), _branches(part), *([each] for each in _dependents(part))]
            if self._declares(part) + sum(any(id(each) in declaring for each in group) for group in groups) > 1:
                found.append(part)
        return found

    def ids_within(self, combined: list[_Schema]) -> dict[int, None]:
        """Ids of these schemas and of all schemas that apply to the same values, in order."""
        found: dict[int, None] = {}
        waiting = combined[::-1]
        while waiting:
            part = waiting.pop()
            if id(part) not in found and id(part) in self._parts:
                found[id(part)] = None
                waiting += reversed(self.applied_subschemas(part))
        return found

    def _ids_declaring(self) -> set[int]:
        """Ids of schemas that declare properties, by themselves or through schemas that apply to the same value."""
        appliers: dict[int, list[_Schema]] = {}
        for part in self:
            for inner in self.applied_subschemas(part):
                appliers.setdefault(id(inner), []).append(part)
        found: set[int] = set()
        waiting = [part for part in self if self._declares(part)]
        while waiting:
            part = waiting.pop()
            if id(part) not in found:
                found.add(id(part))
                waiting += appliers.get(id(part), ())
        return found

    def applied_subschemas(self, part: _Schema) -> list[_Schema]:
        """The schemas that apply to the same value as `part`."""
        listed = [each for key in ("allOf", "anyOf", "oneOf") for each in _schemas(part, key)]
        return [*listed, *self._target(part), *_branches(part), *_dependents(part)]

    def close_combination(self, part: _Schema) -> None:
        """Closes a combination around the properties of its parts, unless one of them has a rule for other keys."""
        applied = [self._parts[key] for key in self.ids_within([part])]
        names = dict.fromkeys(name for each in applied if _has_properties(each) for name in each["properties"])
        if any(_allows_other_keys(each, names) for each in applied):
            return
        own = part.setdefault("properties", {}) if _has_properties(part) or "properties" not in part else None
        if own is not None:
            own.update({name: True for name in names if name not in own})
            part["additionalProperties"] = False

    def _target(self, part: _Schema) -> list[_Schema]:
        return [self._targets[id(part)]] if id(part) in self._targets else []


def _copy(schema: Mapping[str, Any]) -> _Schema:
    """A deep copy without recursion; the nesting depth is checked elsewhere."""
    copies: list[Any] = []
    work: list[tuple[Any, Any, Any]] = [(copies, None, schema)]  # (target container, key in it, original)
    while work:
        target, key, value = work.pop()
        copy: Any = value
        if isinstance(value, Mapping):
            copy = dict.fromkeys(value)  # keeps the order
            work += ((copy, name, inner) for name, inner in value.items())
        elif isinstance(value, list | tuple):
            copy = [None] * len(value)
            work += ((copy, i, inner) for i, inner in enumerate(value))
        if target is copies:
            copies.append(copy)
        else:
            target[key] = copy
    root: _Schema = copies[0]
    return root


def _schemas(part: _Schema, key: str) -> list[_Schema]:
    inner = part.get(key)
    return [each for each in inner if isinstance(each, dict)] if isinstance(inner, list) else []


def _branches(part: _Schema) -> list[_Schema]:
    return [part[key] for key in ("then", "else") if "if" in part and isinstance(part.get(key), dict)]


def _dependents(part: _Schema) -> list[_Schema]:
    maps = [part.get(key) for key in ("dependentSchemas", "dependencies")]
    return [each for inner in maps if isinstance(inner, dict) for each in inner.values() if isinstance(each, dict)]


def resolve_reference(root: _Schema, reference: object) -> _Schema | None:
    """The schema that a reference within `root` points to."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    found: Any = root
    for step in unquote(reference).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(step)
        elif isinstance(found, list) and step.isdecimal() and len(step) < 8:
            found = found[int(step)] if int(step) < len(found) else None
        else:
            return None
    return found if isinstance(found, dict) else None

"""Rewrites a JSON schema into keywords that the grammar library enforces, and removes the others.

    exact        keyword -> other keywords with the same meaning       dependentRequired, oneOf of disjoint schemas, ...
    annotation   removed, as the standard allows                       an unknown `format`
    relaxation   removed; the result accepts more than the schema      uniqueItems of strings, contains, ...

Values of the original schema are always values of the rewritten one, except for the limits of the library (order of
keys). A relaxation has a name, `keyword (at JSON pointer)`, so that the caller can say what is not enforced.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from mvllm.structured_output.additional_properties import STRICT_KEY, resolve_reference
from mvllm.structured_output.schema_values import (
    ANNOTATIONS,
    canonical,
    count_of,
    disjoint,
    escape_key,
    finite_values,
    is_regex,
    other_types,
    reference_targets,
    strings_of,
    types_of,
)

KNOWN_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
"""Formats that the grammar library enforces."""

MAX_SHOWN = 16
"""Most relaxations that are named, for schemas with very many."""

_MAX_ALTERNATIVES = 70
"""Most arrays into which a set of a few values is expanded."""

_MAX_REWRITES = 12
"""Most rewrites that add alternatives: two alternatives each multiply when the library joins them."""

_LIBRARY_KEY = "x-guidance"
"""Options of the grammar library, which the engine sets: some of them drop keywords in silence."""

_NOTHING: Mapping[str, Any] = {"enum": []}
_MAX_COMPARED = 64
_MAX_NEGATED = 16
_DATA = frozenset({"const", "enum", "default", "examples"})
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
_SINGLE = frozenset(
    {
        *("items", "additionalItems", "unevaluatedItems", "contains"),
        *("additionalProperties", "unevaluatedProperties", "propertyNames"),
        *("then", "else"),  # `if` and `not` are looked at as they are
    }
)
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_APPLIED = ("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "dependencies")

_Schema = dict[str, Any]


class Relaxations(list[str]):
    """Names of keywords that are not enforced: `keyword (at pointer)`, or `format 'name' (at pointer)`."""

    def add(self, name: str, path: str) -> None:
        """Adds a keyword, unless there are very many."""
        if len(self) < MAX_SHOWN:
            path = "".join(c if c.isprintable() else "?" for c in path)
            self.append(f"{name} (at {path if len(path) <= 120 else path[:60] + '...' + path[-57:]})")


def is_annotation(relaxation: str) -> bool:
    """Whether the standard does not require the keyword to be enforced."""
    return relaxation.startswith("format ")


def keyword(relaxation: str) -> str:
    """The keyword of a relaxation; of a format, with its name."""
    return relaxation.partition(" (at ")[0]


class SchemaRewriter:
    """Rewrites one schema.

    Args:
        root: The schema; nested no deeper than `MAX_NESTING`.
        relax: Names of keywords that are removed although the library enforces them in many cases, because it has
            refused the schema: `oneOf`, `pattern`, `patternProperties`, `minProperties`, `$ref` (its siblings),
            `allOf` and `anyOf` (beside other keywords), and `rewrites`, for those that are otherwise exact.
        is_usable_pattern: Whether the library compiles a regular expression; only called with `pattern` in `relax`.

    Attributes:
        relaxations: The names of what was removed.
    """

    def __init__(
        self,
        root: Mapping[str, Any],
        relax: frozenset[str] = frozenset(),
        is_usable_pattern: Callable[[str], bool] = bool,
    ) -> None:
        self._root = dict(root)
        self._relax = relax
        self._is_usable_pattern = is_usable_pattern
        self._num_rewrites = 0
        self._targets = reference_targets(root)
        self.relaxations = Relaxations()

    def rewrite(self) -> Any:
        """The rewritten schema.

        Raises:
            ValueError: A keyword below STRICT_KEY cannot be enforced.
        """
        return self.rewrite_part(self._root, "#", strict=False, declared={})

    # --- one schema

    def rewrite_part(self, schema: Any, path: str, *, strict: bool, declared: Mapping[str, Any]) -> Any:
        """A rewritten copy.

        Args:
            declared: The properties that a schema around it declares for the same value.
        """
        if not isinstance(schema, dict):
            return schema
        strict = strict or schema.get(STRICT_KEY) is True
        part: _Schema = {}
        own = schema.get("properties")
        known = {**declared, **own} if isinstance(own, dict) else declared
        for key, value in schema.items():
            at = f"{path}/{escape_key(key)}"
            if key in (STRICT_KEY, _LIBRARY_KEY):
                continue
            if key in _MAPS and isinstance(value, dict):
                part[key] = {
                    name: self.rewrite_part(each, f"{at}/{escape_key(name)}", strict=strict, declared={})
                    for name, each in value.items()
                }
            elif key in _LISTS and isinstance(value, list):
                inner = known if key in ("anyOf", "oneOf", "allOf") else {}
                part[key] = [
                    self.rewrite_part(each, f"{at}/{i}", strict=strict, declared=inner) for i, each in enumerate(value)
                ]
            elif key in _SINGLE:
                inner = known if key in ("then", "else") else {}
                part[key] = self.rewrite_part(value, at, strict=strict, declared=inner)
            elif key not in _DATA and isinstance(value, dict | list) and any(t.startswith(at) for t in self._targets):
                part[key] = self._elsewhere(value, at, strict=strict)
            else:
                part[key] = value
        _Rewrites(self, part, path, strict, known).apply()
        return part

    def _elsewhere(self, value: Any, path: str, *, strict: bool) -> Any:
        """A copy of a place that is not a schema itself, but has schemas that references point to."""
        if path in self._targets:
            return self.rewrite_part(value, path, strict=strict, declared={})
        if isinstance(value, dict):
            return {k: self._elsewhere(each, f"{path}/{escape_key(k)}", strict=strict) for k, each in value.items()}
        if isinstance(value, list):
            return [self._elsewhere(each, f"{path}/{i}", strict=strict) for i, each in enumerate(value)]
        return value

    def resolve(self, schema: Any) -> Any:
        """The schema that a schema of a local reference alone stands for."""
        for _ in range(8):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                break
            target = resolve_reference(self._root, schema["$ref"])
            if target is None:
                break
            schema = target
        return schema

    def relaxes(self, name: str) -> bool:
        """Whether `name` is among the keywords to remove."""
        return name in self._relax

    def is_usable(self, pattern: str) -> bool:
        """Whether the library compiles a regular expression."""
        return self._is_usable_pattern(pattern)

    def may_rewrite(self) -> bool:
        """Counts a rewrite that adds alternatives; False if there are too many already."""
        self._num_rewrites += 1
        return self._num_rewrites <= _MAX_REWRITES and not self.relaxes("rewrites")


class _Rewrites:
    """The rewrites of one schema, in place; the schemas in it are rewritten already, except for `not` and `if`."""

    def __init__(
        self, rewriter: SchemaRewriter, part: _Schema, path: str, strict: bool, declared: Mapping[str, Any]
    ) -> None:
        self._rewriter = rewriter
        self._part = part
        self._path = path
        self._strict = strict
        self._declared = declared

    def apply(self) -> None:
        part = self._part
        for key in _COUNTS:
            if isinstance(count := part.get(key), float) and count.is_integer():
                part[key] = int(count)
        if "format" in part:
            self._format()
        if part.get("pattern") is not None and self._rewriter.relaxes("pattern"):
            self._pattern()
        patterns = part.get("patternProperties")
        if self._rewriter.relaxes("patternProperties") and isinstance(patterns, dict) and all(map(is_regex, patterns)):
            if part.get("additionalProperties") is not None:
                del part["additionalProperties"]  # it would apply to the keys of the patterns
            self._drop("patternProperties")
        for key, rewrite in (
            ("unevaluatedProperties", self._unevaluated_properties),  # first: what they apply to depends on others
            ("unevaluatedItems", self._unevaluated_items),
            ("$recursiveRef", self._dynamic_ref),
            ("$dynamicRef", self._dynamic_ref),
            ("uniqueItems", self._unique_items),
            ("contains", self._contains),
            ("propertyNames", self._property_names),
            ("dependencies", self._dependencies),
            ("dependentRequired", self._dependencies),
            ("dependentSchemas", self._dependencies),
            ("if", self._if),
            ("not", self._not),
            ("oneOf", self._one_of),
        ):
            if key in part:
                rewrite()
        for key in ("then", "else", "minContains", "maxContains", "$recursiveAnchor", "$dynamicAnchor"):
            part.pop(key, None)  # without `if`, `contains` or references to them
        self._num_properties()
        if self._rewriter.relaxes("$ref") and "$ref" in part:
            self._siblings()
        for key in ("allOf", "anyOf"):
            if self._rewriter.relaxes(key) and isinstance(part.get(key), list) and part.keys() - ANNOTATIONS != {key}:
                self._drop(key)

    def _relaxed(self, name: str) -> None:
        """Names a keyword that is not enforced.

        Raises:
            ValueError: The schema is strict.
        """
        if self._strict:
            raise ValueError(
                f"strict is true, so every keyword must be enforced, but {name} at {self._path} cannot be. "
                "Leave it out, or send strict false: the output is then validated after it was generated"
            )
        self._rewriter.relaxations.add(name, self._path)

    def _drop(self, key: str) -> None:
        self._relaxed(key)
        del self._part[key]

    def _also(self, schema: _Schema) -> None:
        """Adds a schema that values must satisfy too."""
        listed = self._part.get("allOf")
        if isinstance(listed, list):
            listed.append(schema)
        else:
            self._part["allOf"] = [schema]

    def types_of(self) -> tuple[str, ...]:
        return types_of(self._part)

    def _inner(self, schema: Any, place: str) -> Any:
        """A schema for the same value, rewritten."""
        path = f"{self._path}/{place}"
        return self._rewriter.rewrite_part(schema, path, strict=self._strict, declared=self._declared)

    # --- strings

    def _format(self) -> None:
        name = self._part["format"]
        if isinstance(name, str) and name not in KNOWN_FORMATS:
            del self._part["format"]
            shown = "".join(c if c.isprintable() else "?" for c in name[:40])
            self._rewriter.relaxations.add(f"format '{shown}'", self._path)

    def _pattern(self) -> None:
        pattern = self._part["pattern"]
        is_usable = not self._rewriter.relaxes("all patterns") and self._rewriter.is_usable(str(pattern))
        if is_regex(pattern) and not is_usable:
            self._drop("pattern")

    # --- references

    def _dynamic_ref(self) -> None:
        for key in ("$recursiveRef", "$dynamicRef"):
            if key in self._part:
                if self._part[key] == "#" and "$ref" not in self._part:
                    self._part["$ref"] = self._part.pop(key)  # the same, unless another schema extends this one
                else:
                    self._drop(key)

    def _siblings(self) -> None:
        """Removes what stands beside a reference: the library cannot join it with a schema that contains itself."""
        kept = ANNOTATIONS | {"$ref", "$defs", "definitions", "$schema", "$id", "id"}
        for key in [key for key in self._part if key not in kept]:
            self._drop(key)

    # --- arrays

    def _unique_items(self) -> None:
        part = self._part
        if part["uniqueItems"] is not True:
            del part["uniqueItems"]
            return
        least, most = count_of(part.get("minItems"), 0), count_of(part.get("maxItems"), 1 << 30)
        values = finite_values(self._rewriter.resolve(part.get("items")))
        if most <= 1:
            del part["uniqueItems"]
            return
        if values is None or "prefixItems" in part or part.get("type") != "array":
            self._drop("uniqueItems")
            return
        most = min(most, len(values))
        sizes = range(least, most + 1)
        if "enum" not in part and "const" not in part and len(values) <= 5 and self._rewriter.may_rewrite():
            arrays = [list(each) for size in sizes for each in itertools.permutations(values, size)]
            if 0 < len(arrays) <= _MAX_ALTERNATIVES:
                part["enum"] = arrays
                for key in ("uniqueItems", "items", "minItems", "maxItems", "contains"):
                    part.pop(key, None)
                return
        part["maxItems"] = most
        self._drop("uniqueItems")

    def _contains(self) -> None:
        part = self._part
        least = count_of(part.get("minContains"), 1)
        is_trivial = part["contains"] in (True, {})
        if least:
            part["minItems"] = max(least, count_of(part.get("minItems"), 0))
        if is_trivial and "maxContains" in part:
            part["maxItems"] = min(count_of(part["maxContains"], 1 << 30), count_of(part.get("maxItems"), 1 << 30))
        if is_trivial or (least == 0 and "maxContains" not in part):
            del part["contains"]
        else:
            self._drop("contains")

    def _unevaluated_items(self) -> None:
        part = self._part
        rule = part.pop("unevaluatedItems")
        if rule in (True, {}) or ("items" in part and not isinstance(part["items"], list)):
            return
        if any(key in part for key in (*_APPLIED, "contains")):
            self._relaxed("unevaluatedItems")
        elif isinstance(part.get("items"), list):
            part.setdefault("additionalItems", rule)
        elif "prefixItems" not in part:
            part["items"] = rule
        else:
            part["items"], part["additionalItems"] = part.pop("prefixItems"), rule

    # --- objects

    def _unevaluated_properties(self) -> None:
        part = self._part
        rule = part.pop("unevaluatedProperties")
        if rule in (True, {}) or "additionalProperties" in part:
            return
        if any(key in part for key in _APPLIED):
            self._relaxed("unevaluatedProperties")
        else:
            part["additionalProperties"] = rule

    def _num_properties(self) -> None:
        part = self._part
        properties = part.get("properties")
        names = set(properties) if isinstance(properties, dict) else set()
        keys = set(strings_of(part.get("required")))
        if 0 < count_of(part.get("minProperties"), 0) <= len(keys):
            del part["minProperties"]
        is_closed = part.get("additionalProperties") is False and "patternProperties" not in part
        if "maxProperties" in part and is_closed and len(names) <= count_of(part["maxProperties"], 0):
            del part["maxProperties"]
        if self._rewriter.relaxes("minProperties") and (names - keys or self._rewriter.relaxes("all minProperties")):
            for key in ("minProperties", "maxProperties"):
                if key in part:
                    self._drop(key)

    def _property_names(self) -> None:
        part = self._part
        names = part["propertyNames"]
        if names in (True, {}) or (isinstance(names, dict) and set(names) <= {"type"} and "string" in types_of(names)):
            del part["propertyNames"]
        elif names is False:
            del part["propertyNames"]
            self._also({"maxProperties": 0})
        else:
            self._restrict_names(self._rewriter.resolve(names))

    def _restrict_names(self, names: object) -> None:
        """Names of a finite set become properties; names with a pattern or a length become a pattern property."""
        part = self._part
        others, properties = part.get("additionalProperties", True), part.get("properties")
        declared: _Schema = properties if isinstance(properties, dict) else {}
        values = finite_values(names)
        if "patternProperties" in part or not isinstance(names, dict):
            self._drop("propertyNames")
        elif values is not None:
            del part["propertyNames"]
            part["properties"] = {name: each if name in values else False for name, each in declared.items()}
            if others is not False:
                part["properties"] |= {name: others for name in strings_of(values) if name not in declared}
            part["additionalProperties"] = False
        elif declared or others is False or (pattern := _pattern_of_names(names)) is None:
            self._drop("propertyNames")
        else:
            del part["propertyNames"]
            part["patternProperties"], part["additionalProperties"] = {pattern: others}, False

    def _dependencies(self) -> None:
        """`dependentRequired`, `dependentSchemas`, and `dependencies`, which could be either."""
        part = self._part
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            if not isinstance(rules := part.pop(key, None), dict):
                continue
            for i, (trigger, rule) in enumerate(rules.items()):
                if isinstance(rule, str):  # draft 3
                    rule = [rule]
                if isinstance(rule, list) and all(isinstance(name, str) for name in rule):
                    rule = {"required": rule}
                elif key == "dependencies":
                    rule = self._inner(rule, f"dependencies/{escape_key(trigger)}")
                if rule in (True, {}) or not isinstance(rule, dict | bool):
                    continue
                if trigger in strings_of(part.get("required")):
                    self._also(rule if isinstance(rule, dict) else dict(_NOTHING))
                elif rule is False:
                    self._also({"properties": {trigger: False}})
                elif i < 4 and self._rewriter.may_rewrite():
                    present: _Schema = {"required": [trigger], "allOf": [rule]}
                    if isinstance(rule, dict) and rule.keys() == {"required"}:
                        present = {"required": list(dict.fromkeys([trigger, *rule["required"]]))}
                    self._also({"anyOf": [{"properties": {trigger: False}}, present]})
                else:
                    self._relaxed(key)

    def _if(self) -> None:
        part = self._part
        condition, then, otherwise = part.pop("if"), part.pop("then", True), part.pop("else", True)
        if then in (True, {}) and otherwise in (True, {}):
            return
        if isinstance(condition, bool):
            chosen = then if condition else otherwise
            if chosen not in (True, {}):
                self._also(chosen if isinstance(chosen, dict) else dict(_NOTHING))
            return
        branches = self._branches(condition)
        if branches is None or not self._rewriter.may_rewrite():
            self._relaxed("if")
            return
        alternatives = []
        for branch, outcome in zip(branches, (then, otherwise), strict=True):
            if branch is not None and outcome is not False:
                alternatives.append({**branch, "allOf": [outcome]} if outcome not in (True, {}) else branch)
        self._also({"anyOf": alternatives} if alternatives else dict(_NOTHING))

    def _branches(self, condition: Any) -> tuple[_Schema | None, _Schema | None] | None:
        """The condition and its negation as schemas, if it compares one property of few values; None for no values."""
        if not isinstance(condition, dict) or not set(condition) <= {"properties", "required", "type"}:
            return None
        properties = condition.get("properties")
        if not isinstance(properties, dict) or len(properties) != 1 or condition.get("type", "object") != "object":
            return None
        [(name, compared)] = properties.items()
        required = condition.get("required", [])
        chosen = finite_values(compared)
        every = finite_values(self._rewriter.resolve(self._declared.get(name)))
        if chosen is None or every is None or required not in ([], [name]):
            return None
        keys = {canonical(value) for value in chosen}
        yes = [value for value in every if canonical(value) in keys]
        no = [value for value in every if canonical(value) not in keys]
        one = {"properties": {name: {"enum": yes}}} if yes else {"properties": {name: False}}
        other = {"properties": {name: {"enum": no}}} if no else {"properties": {name: False}}
        if required:
            return ({**one, "required": [name]} if yes else None), other
        return one, ({**other, "required": [name]} if no else None)

    # --- combinations

    def _not(self) -> None:
        forbidden = self._rewriter.resolve(self._part["not"])
        rest = self._negated(forbidden)
        if rest is None:
            self._drop("not")
            return
        del self._part["not"]
        if rest is False:
            self._part["enum"] = []
        elif rest is not True:
            self._also(rest)

    def _negated(self, schema: Any) -> _Schema | bool | None:
        """The schema of all values that do not satisfy `schema`; None if there is no small one."""
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, dict):
            return None
        keys = schema.keys() - ANNOTATIONS
        if not keys:
            return False
        if keys == {"type"}:
            return other_types(schema)
        if keys == {"required"} or (keys == {"required", "type"} and schema["type"] == "object"):
            return self._without_one_of(schema)
        if keys == {"anyOf"} and isinstance(schema["anyOf"], list):
            return self._none_of(schema["anyOf"])
        if keys == {"not"}:
            rewritten: _Schema | bool = self._inner(schema["not"], "not/not")
            return rewritten
        return self._other_values(schema) if keys <= {"const", "enum", "type"} else None

    def _without_one_of(self, schema: _Schema) -> _Schema | None:
        """Objects that lack one of the names in `required`."""
        names = strings_of(schema["required"])
        if "type" in schema and self._part.get("type") != "object":
            return None  # values that are no objects would have to be listed
        without: list[_Schema] = [{"type": "object", "properties": {name: False}} for name in names]
        if len(without) == 1:
            return without[0]
        return {"anyOf": without} if 0 < len(without) <= 4 and self._rewriter.may_rewrite() else None

    def _none_of(self, options: list[Any]) -> _Schema | bool | None:
        """Values that satisfy none of the options."""
        if len(options) > _MAX_NEGATED:
            return None
        rest = [self._negated(self._rewriter.resolve(each)) for each in options]
        if any(each is False for each in rest):
            return False
        return None if None in rest else {"allOf": [each for each in rest if each is not True]}

    def _other_values(self, schema: _Schema) -> _Schema | bool | None:
        """The values of this part without those of `schema`, if both have finitely many."""
        gone = finite_values(schema)
        own = finite_values({key: value for key, value in self._part.items() if key != "not"})
        if gone is None or own is None:
            return None
        gone_keys = {canonical(value) for value in gone}
        left = [value for value in own if canonical(value) not in gone_keys]
        return {"enum": left} if left else False

    def _one_of(self) -> None:
        part, rewriter = self._part, self._rewriter
        options = part["oneOf"]
        if not isinstance(options, list):
            return
        if len(options) <= 1 or self._are_disjoint(options):
            self._replace_one_of({"anyOf": options})
            return
        names = [
            each["required"][0]
            for each in options
            if isinstance(each, dict)
            and each.keys() - ANNOTATIONS == {"required"}
            and len(strings_of(each["required"])) == 1
        ]
        if len(set(names)) == len(options) <= 6 and rewriter.may_rewrite():
            exactly_one: list[_Schema] = [
                {"type": "object", "properties": {o: False for o in names if o != name}, "required": [name]}
                for name in names
            ]
            self._replace_one_of({"anyOf": exactly_one})
        elif rewriter.relaxes("oneOf"):
            if self._strict:
                self._relaxed("oneOf")
            self._rewriter.relaxations.add("oneOf", self._path)
            self._replace_one_of({"anyOf": options})

    def _replace_one_of(self, schema: _Schema) -> None:
        """Replaces `oneOf` at its place, since the order of keywords determines that of an object's keys."""
        part = self._part
        items = [("allOf", [schema]) if key == "oneOf" else (key, value) for key, value in part.items()]
        if "anyOf" not in part:
            items = [("anyOf", schema["anyOf"]) if key == "oneOf" else (key, value) for key, value in part.items()]
        elif "allOf" in part:
            items = [(key, value) for key, value in part.items() if key != "oneOf"]
            self._also(schema)
        part.clear()
        part.update(items)

    def _are_disjoint(self, options: list[Any]) -> bool:
        if len(options) > _MAX_COMPARED:
            return False
        resolved = [self._rewriter.resolve(each) for each in options]
        return all(disjoint(a, b) for a, b in itertools.combinations(resolved, 2))


def _pattern_of_names(names: _Schema) -> str | None:
    """A pattern of the names that a schema of strings permits; None if it is not known."""
    if not set(names) <= {"type", "pattern", "minLength", "maxLength"}:
        return None
    pattern, low, high = names.get("pattern"), names.get("minLength"), names.get("maxLength")
    if pattern is not None and (low is not None or high is not None):
        return None
    length = f"^[\\s\\S]{{{count_of(low, 0)},{'' if high is None else count_of(high, 0)}}}$"
    return str(pattern or length)

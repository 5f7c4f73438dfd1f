"""Which objects of a JSON schema are closed."""

from __future__ import annotations

import copy
from typing import Any

import jsonschema
import pytest

from mvllm.errors import RequestError
from mvllm.structured_output.additional_properties import close_all_objects, close_declared_objects

NUMBER = {"type": "number"}
POINT: dict[str, Any] = {"type": "object", "properties": {"x": NUMBER}, "required": ["x"]}
POINT_3D = {"type": "object", "properties": {"z": NUMBER}, "required": ["z"]}


def takes(schema: dict[str, Any], value: object) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


def nested(**places: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"p": places}}


@pytest.mark.parametrize(
    ("schema", "taken", "not_taken"),
    [
        (POINT, {"x": 1}, {"x": 1, "y": 2}),
        (nested(**POINT), {"p": {"x": 1}}, {"p": {"x": 1, "y": 2}}),
        (nested(type="array", items=POINT), {"p": [{"x": 1}]}, {"p": [{"x": 1, "y": 2}]}),
        (nested(anyOf=[POINT, {"type": "null"}]), {"p": {"x": 1}}, {"p": {"x": 1, "y": 2}}),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": POINT}}, {"x": 1}, {"x": 1, "y": 2}),
        ({"$ref": "#/elsewhere/point", "elsewhere": {"point": POINT}}, {"x": 1}, {"x": 1, "y": 2}),
        ({**nested(allOf=[{"$ref": "#/$defs/point"}]), "$defs": {"point": POINT}},
         {"p": {"x": 1}}, {"p": {"x": 1, "y": 2}}),
        ({**POINT, "anyOf": [{"required": ["x"]}, {"required": ["y"]}]}, {"x": 1}, {"x": 1, "y": 2}),
        (nested(type=["object", "null"], properties={}), {"p": {}}, {"p": {"y": 2}}),
        ({"properties": {"properties": {"const": {"properties": {}}}}},
         {"properties": {"properties": {}}}, {"properties": {"properties": {}}, "y": 2}),
    ],
    ids=["top", "nested", "array", "anyOf", "reference", "odd place", "one of allOf", "required", "nullable", "names"],
)  # fmt: skip
@pytest.mark.parametrize("strict", [False, True], ids=["declared", "strict"])
def test_objects_that_declare_properties_are_closed(
    schema: dict[str, Any], taken: object, not_taken: object, strict: bool
) -> None:
    before = copy.deepcopy(schema)
    assert takes(schema, taken) and takes(schema, not_taken)
    closed = close_all_objects(schema, "strict") if strict else close_declared_objects(schema)
    assert takes(closed, taken) and not takes(closed, not_taken)
    assert schema == before


@pytest.mark.parametrize(
    ("schema", "value", "words"),
    [
        ({**POINT, "additionalProperties": True}, {"x": 1, "y": 2}, "but # has additionalProperties true"),
        (nested(**POINT, additionalProperties=NUMBER), {"p": {"x": 1, "y": 2}}, "#/properties/p has .* a schema"),
        ({"allOf": [POINT, POINT_3D]}, {"x": 1, "z": 2}, "# combines several objects"),
        ({**POINT, "oneOf": [POINT_3D]}, {"x": 1, "z": 2}, "# combines"),
        ({"allOf": [{"$ref": "#/$defs/p"}, POINT_3D], "$defs": {"p": POINT}}, {"x": 1, "z": 2}, "# combines"),
    ],
    ids=["open", "map", "allOf", "beside", "derived"],
)
def test_explicitly_open_objects_and_combinations_are_refused_by_strict(
    schema: dict[str, Any], value: object, words: str
) -> None:
    assert takes(close_declared_objects(schema), value)
    with pytest.raises(RequestError, match=words):
        close_all_objects(schema, "strict")


DERIVED = {"allOf": [{"$ref": "#/$defs/p"}, POINT_3D], "$defs": {"p": POINT}}
BY_SHAPE = {**POINT, "if": {"properties": {"x": {"const": 0}}}, "then": POINT_3D, "else": nested()}


@pytest.mark.parametrize(
    ("schema", "taken", "not_taken"),
    [
        (DERIVED, {"x": 1, "z": 2}, {"x": 1, "z": 2, "y": 3}),
        (nested(**POINT, oneOf=[POINT_3D, {**nested(), "required": ["p"]}]),
         {"p": {"x": 1, "z": 2}}, {"p": {"x": 1, "z": 2, "y": 3}}),
        ({"allOf": [DERIVED, {"properties": {"w": NUMBER}}], "$defs": {"p": POINT}},
         {"x": 1, "z": 2, "w": 3}, {"x": 1, "z": 2, "w": 3, "y": 4}),
        (BY_SHAPE, {"x": 0, "z": 2}, {"x": 0, "z": 2, "y": 3}),
        ({**POINT, "dependentSchemas": {"x": POINT_3D}}, {"x": 1, "z": 2}, {"x": 1, "z": 2, "y": 3}),
    ],
    ids=["derived", "beside", "combinations of combinations", "if", "dependentSchemas"],
)  # fmt: skip
def test_a_combination_is_closed_around_the_properties_of_all_its_parts(
    schema: dict[str, Any], taken: object, not_taken: object
) -> None:
    before = copy.deepcopy(schema)
    closed = close_declared_objects(schema)
    assert takes(schema, taken) and takes(schema, not_taken)
    assert takes(closed, taken) and not takes(closed, not_taken)
    assert schema == before


@pytest.mark.parametrize(
    ("rule", "value"),
    [
        ({"additionalProperties": True}, {"x": 1, "y": 2}),
        ({"additionalProperties": NUMBER}, {"x": 1, "y": 2}),
        ({"patternProperties": {"^y": NUMBER}}, {"x": 1, "z": 2}),
        ({"unevaluatedProperties": NUMBER}, {"x": 1, "y": 2}),
        ({"propertyNames": {"maxLength": 1}}, {"x": 1, "y": 2}),
        ({"minProperties": 2}, {"x": 1, "y": 2}),
        ({"dependentRequired": {"x": ["y"]}}, {"x": 1, "y": 2}),
    ],
)
def test_an_object_with_a_rule_for_other_keys_stays_open(rule: dict[str, Any], value: dict[str, Any]) -> None:
    assert takes(close_declared_objects({**POINT, **rule}), value)


def test_a_combination_with_a_rule_for_other_keys_stays_open() -> None:
    combined = {"allOf": [{**POINT, "additionalProperties": True}, {"properties": {"w": NUMBER}}]}
    assert close_declared_objects(combined) == combined


@pytest.mark.parametrize("test", ["not", "if", "contains"])
def test_schemas_that_only_test_a_value_are_not_closed(test: str) -> None:
    assert "additionalProperties" not in close_declared_objects({test: POINT})[test]


def test_an_object_without_properties_is_closed_by_strict_alone() -> None:
    assert takes(close_declared_objects({"type": "object"}), {"y": 2})
    assert not takes(close_all_objects({"type": "object"}, "strict"), {"y": 2})


def test_an_object_that_requires_a_key_beyond_its_properties_stays_open() -> None:
    schema = {**POINT, "required": ["x", "y"]}
    assert takes(close_declared_objects(schema), {"x": 1, "y": 2})
    assert not takes(close_declared_objects(nested(**schema)), {"p": {"x": 1, "y": 2}, "q": 3})


def test_circular_and_dangling_references_terminate() -> None:
    schema = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}, "c": {"$ref": 5}}}
    odd = {**POINT, "allOf": 5, "items": [{"$ref": "#/items/7"}, {"$ref": "#/type/x"}, {"$ref": "http://x/y"}]}
    assert close_all_objects(schema, "strict") == close_declared_objects(schema) == schema
    assert close_declared_objects(odd) == {**odd, "additionalProperties": False}

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
def test_explicitly_open_and_combined_objects_stay_open_unless_strict(
    schema: dict[str, Any], value: object, words: str
) -> None:
    assert takes(close_declared_objects(schema), value)
    with pytest.raises(RequestError, match=words):
        close_all_objects(schema, "strict")


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

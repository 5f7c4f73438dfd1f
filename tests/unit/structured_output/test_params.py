"""Validation of structured-output parameters, before anything is compiled."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import msgspec
import pytest

from mvllm import RequestError, SamplingParams, StructuredOutputsParams
from mvllm.messages.structured_outputs import MAX_GRAMMAR_BYTES
from mvllm.structured_output import llguidance_library
from mvllm.structured_output.additional_properties import STRICT_KEY
from mvllm.structured_output.response_format import parse_response_format

TAG = {"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "choice": ["b"]}, "found regex and choice"),
        ({"json_object": False}, "none of them"),
        ({"json_object": 1}, "json_object must be True"),
        ({"json": "{"}, "not valid JSON"),
        ({"json": "[1]"}, "must be a JSON schema"),
        ({"json": {"x": float("nan")}}, "cannot be written as JSON"),
        ({"json": '{"minimum": NaN}'}, "NaN is no JSON value"),
        ({"json": {"x": object()}}, "cannot be written as JSON"),
        ({"json": nested(100)}, "nests deeper"),
        ({"json": nested(10_000)}, "nests deeper"),
        ({"json": {"enum": [f"value {i}" for i in range(100_000)]}}, "at most 262144"),
        ({"regex": "a", "thoughts_start": "<t>"}, "together with thoughts_end"),
        ({"regex": "a", "thoughts_end": ""}, "thoughts_end is empty"),
        ({"regex": "a", "thoughts_end": "x" * 65}, "at most 64"),
        ({"structural_tag": {}}, "1 to 128 structures"),
        ({"structural_tag": "{"}, "not valid JSON"),
        ({"structural_tag": {"structures": [{}], "triggers": ["<"]}}, "structure 0 needs"),
        ({"structural_tag": {"structures": [TAG], "triggers": [""]}}, "triggers"),
        ({"structural_tag": {"structures": [TAG], "triggers": ["["]}}, "none of the triggers"),
        ({"structural_tag": {"structures": [TAG] * 128, "triggers": ["["] * 200 + ["<"]}}, "128 triggers"),
        (
            {"structural_tag": {"structures": [{**TAG, "schema": {"x": "y" * 9000}}] * 99, "triggers": ["<"]}},
            "has more",
        ),
        ({"structural_tag": {"structures": [{**TAG, "schema": 5}], "triggers": ["<"]}}, "structure 0 needs"),
        ({"regex": ""}, "regex is empty"),
        ({"regex": 5}, "regex must be a text"),
        ({"regex": "\ud800"}, "lone surrogate"),
        ({"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "at most"),
        ({"grammar": " \n"}, "grammar is empty"),
        ({"choice": []}, "1 to 10000"),
        ({"choice": ["a"] * 10_001}, "1 to 10000"),
        ({"choice": ["a", ""]}, "empty text"),
        ({"choice": "yes"}, "must be a list"),
        ({"regex": "a", "whitespace_pattern": " "}, "apply to JSON only"),
        ({"json_object": True, "whitespace_pattern": " ", "disable_any_whitespace": True}, "not both"),
    ],
)
def test_invalid_parameters_are_refused_and_named(fields: dict, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint) as refused:
        StructuredOutputsParams(**fields)
    assert refused.value.parameter == "structured_outputs" and len(str(refused.value)) < 300


def test_a_schema_is_kept_as_text_and_serialized() -> None:
    schema = {"type": "object", "properties": {"größe": {"type": "integer"}}}
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert copy == params == params.clone()
    assert json.loads(copy.structured_outputs.json) == schema and copy.structured_outputs.form == "json"


def test_a_dict_is_accepted_and_its_fields_are_validated() -> None:
    assert SamplingParams(structured_outputs={"regex": "a"}).structured_outputs == StructuredOutputsParams(regex="a")
    with pytest.raises(RequestError, match="has the fields"):
        SamplingParams(structured_outputs={"regexp": "a"})
    with pytest.raises(RequestError, match="must be StructuredOutputsParams"):
        SamplingParams(structured_outputs="a")


def test_response_formats_of_the_openai_interface() -> None:
    schema = {"type": "integer"}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    assert parse_response_format(None) is None and parse_response_format({"type": "text"}) is None
    assert parse_response_format({"type": "json_object"}) == StructuredOutputsParams(json_object=True)
    assert parse_response_format(wanted) == StructuredOutputsParams(json={**schema, STRICT_KEY: True})
    for name in ("schema", "value"):  # those of llama.cpp and of huggingface_hub
        assert parse_response_format({"type": "json_object", name: schema}) == StructuredOutputsParams(json=schema)
    for wrong in ({}, {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": 3}, "text"):
        with pytest.raises(RequestError) as refused:
            parse_response_format(wrong)
        assert refused.value.parameter == "response_format"


def test_strict_response_formats_close_objects() -> None:
    def wanted(schema: object, strict: object) -> StructuredOutputsParams | None:
        return parse_response_format({"type": "json_schema", "json_schema": {"schema": schema, "strict": strict}})

    point = {"type": "object", "properties": {"x": {"type": "number"}}}
    closed = {**point, "additionalProperties": False, STRICT_KEY: True}
    assert wanted(point, True) == wanted(json.dumps(point), True) == StructuredOutputsParams(json=closed)
    assert wanted(point, False) == wanted(point, None) == StructuredOutputsParams(json=point)
    assert wanted(True, True) == StructuredOutputsParams(json={STRICT_KEY: True})
    for schema, strict in ((point, "yes"), ({**point, "additionalProperties": True}, True)):
        with pytest.raises(RequestError, match="strict") as refused:
            wanted(schema, strict)
        assert refused.value.parameter == "response_format"


def test_every_installation_has_the_grammar_library() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert llguidance_library.REQUIREMENT in project["dependencies"]

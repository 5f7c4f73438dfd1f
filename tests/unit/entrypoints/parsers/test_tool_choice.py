"""`tools` and `tool_choice` of requests, and the schemas that enforce them."""

from __future__ import annotations

import copy
import json

import jsonschema
import pytest

from mvllm.entrypoints.parsers.interface import merge_deltas
from mvllm.entrypoints.parsers.tool_choice import parse_tool_choice
from mvllm.errors import RequestError
from mvllm.structured_output.additional_properties import close_declared_objects


def tool(name, parameters=None, **more):
    function = {"name": name, **more} if parameters is None else {"name": name, "parameters": parameters, **more}
    return {"type": "function", "function": function}


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TREE = {  # has references to itself and to a definition, and data that looks like a reference
    "type": "object",
    "properties": {
        "$ref": {"type": "string"},
        "child": {"$ref": "#"},
        "leaf": {"$ref": "#/$defs/leaf"},
        "fixed": {"const": {"$ref": "#/x"}},
    },
    "$defs": {"leaf": {"type": "integer", "examples": [{"$ref": "#"}]}},
    "additionalProperties": False,
}
LEAF = {"type": "object", "properties": {"leaf": {"$ref": "#/$defs/leaf"}}, "$defs": {"leaf": {"type": "string"}}}
TOOLS = [tool("weather", CITY), tool("tree", TREE), tool("leaf", LEAF), tool("now", description="The time")]
WEATHER = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("tools", "choice", "mode"),
    [
        (None, None, "none"),
        ([], "auto", "none"),
        (None, "none", "none"),
        (TOOLS, None, "auto"),
        (TOOLS, "none", "none"),
        (TOOLS, "auto", "auto"),
        (TOOLS, "required", "required"),
        (TOOLS, WEATHER, "named"),
    ],
)
def test_modes(tools, choice, mode):
    read = parse_tool_choice(tools, choice)
    assert (read.mode, read.is_constrained) == (mode, mode in ("required", "named"))
    assert (read.schema() is None) == (read.stream() is None) == (not read.is_constrained)
    assert list(read.tools) == (tools or [])


@pytest.mark.parametrize(
    ("tools", "choice", "words"),
    [
        (None, "required", "the request has no tools"),
        ([], WEATHER, "the request has no tools"),
        (TOOLS, "must", 'must be "none", "auto"'),
        (TOOLS, {"type": "function"}, 'must be "none", "auto"'),
        (TOOLS, {"type": "function", "function": {"name": "x"}}, "'x', which is none of tools: weather, tree"),
        ("x", None, "tools must be a list"),
        ([5], None, r"tools\[0\] must be an object"),
        ([{"type": "web_search"}], None, "other tools are not supported"),
        ([{"type": "function"}], None, "function must be an object"),
        ([tool("")], None, "name must be"),
        ([tool("a b")], None, "name must be"),
        ([tool("a\n")], None, "name must be"),
        ([tool("f"), tool("f")], None, "another function 'f'"),
        ([tool("f", parameters=[1])], None, "must be a JSON schema"),
        ([tool("f", description=5)], None, "must be a text"),
        ([tool("f", strict="yes")], None, "strict must be true or false"),
        (
            [tool("f", {"additionalProperties": True, **CITY}, strict=True)],
            "auto",
            r"tools\[0\].*strict is true.*# has",
        ),
    ],
)
def test_invalid_fields_are_rejected_by_name(tools, choice, words):
    with pytest.raises(RequestError, match=words) as caught:
        parse_tool_choice(tools, choice)
    assert caught.value.parameter in ("tools", "tool_choice")


GOOD = [
    [{"name": "weather", "arguments": {"city": "Paris"}}],
    [{"name": "tree", "arguments": {"child": {"child": {}, "leaf": 5}, "$ref": "x", "fixed": {"$ref": "#/x"}}}],
    [{"name": "leaf", "arguments": {"leaf": "x"}}, {"name": "now", "arguments": {}}],
]
BAD = [
    [],
    {"name": "now", "arguments": {}},
    [{"name": "other", "arguments": {}}],
    [{"name": "weather", "arguments": {}}],
    [{"name": "weather"}],
    [{"name": "tree", "arguments": {"child": {"leaf": "x"}}}],
    [{"name": "tree", "arguments": {"child": {"other": 1}}}],
    [{"name": "leaf", "arguments": {"leaf": 5}}],
    [{"name": "now", "arguments": {}, "more": 1}],
]


class TestSchema:
    def test_required_is_a_list_of_calls_of_the_tools(self):
        before = copy.deepcopy(TOOLS)
        schema = parse_tool_choice(TOOLS, "required").schema()
        jsonschema.Draft202012Validator.check_schema(schema)
        validator = jsonschema.Draft202012Validator(close_declared_objects(schema))  # as it is enforced
        assert [value for value in GOOD if not validator.is_valid(value)] == []
        assert [value for value in BAD if validator.is_valid(value)] == []
        assert before == TOOLS

    def test_without_parallel_calls_it_is_one(self):
        schema = parse_tool_choice(TOOLS, "required", parallel=False).schema()
        validator = jsonschema.Draft202012Validator(schema)
        assert [validator.is_valid(value) for value in GOOD] == [True, True, False]

    def test_named_is_the_functions_parameters(self):
        assert parse_tool_choice(TOOLS, WEATHER).schema() == CITY
        now = {"type": "function", "function": {"name": "now"}}
        assert parse_tool_choice(TOOLS, now).schema() == {"type": "object", "properties": {}}

    @pytest.mark.parametrize("choice", ["required", WEATHER], ids=["required", "named"])
    def test_arguments_have_only_keys_of_the_tool(self, choice):
        def takes(parameters, arguments, **more):
            schema = parse_tool_choice([tool("weather", parameters, **more)], choice).schema()
            value = [{"name": "weather", "arguments": arguments}] if choice == "required" else arguments
            return jsonschema.Draft202012Validator(close_declared_objects(schema)).is_valid(value)

        more = {"city": "Paris", "unit": "C"}
        assert takes(CITY, {"city": "Paris"}) and not takes(CITY, more)
        assert takes({**CITY, "additionalProperties": True}, more)
        assert takes({"type": "object"}, more) and not takes({"type": "object"}, more, strict=True)

    def test_a_deep_schema_needs_no_recursion(self):
        deep: dict = {"type": "string"}
        for _ in range(20_000):
            deep = {"items": deep}
        assert parse_tool_choice([tool("f", deep)], "required").schema()["$defs"]["0"]["items"]


class TestReading:
    @pytest.mark.parametrize("value", GOOD, ids=str)
    def test_required(self, value):
        choice = parse_tool_choice(TOOLS, "required")
        for pieces in ([json.dumps(value, indent=1)], json.dumps(value)):
            stream = choice.stream()
            parsed = merge_deltas([d for piece in pieces for d in stream.feed(piece)] + stream.finish())
            read = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in parsed.tool_calls]
            assert (read, parsed.content) == (value, "")

    def test_named(self):
        choice = parse_tool_choice(TOOLS, WEATHER)
        stream = choice.stream()
        parsed = merge_deltas([d for piece in '{"city": "Paris"}' for d in stream.feed(piece)] + stream.finish())
        [call] = parsed.tool_calls
        assert (call.name, call.arguments, parsed.content) == ("weather", '{"city": "Paris"}', "")

    def test_named_and_truncated(self):
        stream = parse_tool_choice(TOOLS, WEATHER).stream()
        [call] = merge_deltas(stream.feed('{"city": "Par') + stream.finish()).tool_calls
        assert call.arguments == '{"city": "Par'

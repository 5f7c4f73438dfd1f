"""What is enforced of JSON schemas beyond the grammar library's own keywords, and what is named as not enforced."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from mvllm.config.engine_args import EngineArgs
from mvllm.demo import demo_model_path
from mvllm.engine.core.grammars import load_vocabulary
from mvllm.structured_output import llguidance_library
from mvllm.structured_output.additional_properties import STRICT_KEY
from mvllm.structured_output.sandbox_main import CompileJob, CompileResult, compile_job
from mvllm.structured_output.schema_rewriting import KNOWN_FORMATS, keyword

STRING, NUMBER, INTEGER = {"type": "string"}, {"type": "number"}, {"type": "integer"}
Accepts = Callable[[Any], bool]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_vocabulary(EngineArgs(model=str(demo_model_path())).create_engine_config().model).build()


def compiled(tokenizer: Any, schema: Any) -> CompileResult:
    return compile_job(tokenizer, CompileJob("json", json.dumps(schema), ""))


@pytest.fixture
def grammar(tokenizer: Any) -> Callable[[Any], tuple[Accepts, list[str]]]:
    """Whether the grammar of a schema accepts a value, and the keywords that it does not enforce."""

    def make(schema: Any) -> tuple[Accepts, list[str]]:
        result = compiled(tokenizer, schema)
        assert result.error is None, result.error
        api = llguidance_library.load()
        beginning = api.LLMatcher(tokenizer, result.grammar, log_level=0)

        def accepts(value: Any) -> bool:
            matcher = beginning.deep_copy()
            text = json.dumps(value, separators=(",", ":"))
            return bool(matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting())

        return accepts, [keyword(each) for each in result.relaxations]

    return make


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


KIND = {"enum": ["a", "b"]}
BY_KIND = {
    **obj(kind=KIND, n=NUMBER, s=STRING),
    "if": {"properties": {"kind": {"const": "a"}}, "required": ["kind"]},
    "then": {"required": ["n"]},
    "else": {"properties": {"n": False}},
}
CAT = {**obj(kind={"const": "cat"}, lives=INTEGER), "required": ["kind"]}
DOG = {**obj(kind={"const": "dog"}, name=STRING), "required": ["kind"]}

EXACT: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "dependentRequired": (
        {**obj(a=NUMBER, b=NUMBER), "dependentRequired": {"a": ["b"]}}, [{}, {"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]
    ),
    "dependencies": (
        {**obj(a=NUMBER, b=NUMBER), "dependencies": {"a": ["b"]}}, [{}, {"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]
    ),
    "dependencies of one that is required": (
        {**obj(a=NUMBER, b=NUMBER), "required": ["a"], "dependencies": {"a": ["b"]}}, [{"a": 1, "b": 1}], [{"a": 1}]
    ),
    "dependentSchemas": (
        {**obj(a=NUMBER, b={"type": ["number", "string"]}), "dependentSchemas": {"a": obj(b=STRING)}},
        [{"b": 1}, {"a": 1}, {"a": 1, "b": "x"}],
        [{"a": 1, "b": 1}],
    ),
    "if": (
        BY_KIND,
        [{"kind": "a", "n": 1}, {"kind": "a", "n": 1, "s": "x"}, {"kind": "b"}, {}],
        [{"kind": "a"}, {"kind": "b", "n": 1}, {"n": 1}],
    ),
    "if in allOf": (
        {**obj(kind=KIND, n=NUMBER), "allOf": [{k: BY_KIND[k] for k in ("if", "then", "else")}]},
        [{"kind": "a", "n": 1}, {"kind": "b"}],
        [{"kind": "a"}, {"kind": "b", "n": 1}],
    ),
    "oneOf of a discriminated union": (
        {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "$defs": {"cat": CAT, "dog": DOG}},
        [{"kind": "cat", "lives": 9}, {"kind": "dog", "name": "Rex"}],
        [{"kind": "cat", "name": "Rex"}, {"kind": "fox"}, {}],
    ),
    "oneOf of types": ({"oneOf": [STRING, {"type": ["null", "boolean"]}]}, ["a", None, True], [1, {}]),
    "exactly one required": (
        {**obj(a=NUMBER, b=NUMBER), "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 1}],
    ),
    "not required": ({**obj(a=NUMBER, b=NUMBER), "not": {"required": ["a"]}}, [{}, {"b": 1}], [{"a": 1}]),
    "not both required": (
        {**obj(a=NUMBER, b=NUMBER), "not": {"required": ["a", "b"]}}, [{}, {"a": 1}, {"b": 1}], [{"a": 1, "b": 1}]
    ),
    "not type": ({"not": {"type": ["null", "object"]}}, [1, "a", [], True], [None, {}]),
    "not enum": ({"enum": ["a", "b", "c"], "not": {"enum": ["b"]}}, ["a", "c"], ["b"]),
    "not any of": ({"not": {"anyOf": [{"type": "null"}, {"type": "string"}]}}, [1], [None, "a"]),
    "unique items of an enum": (
        {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True},
        [[], ["a"], ["c", "a"], ["b", "c", "a"]],
        [["a", "a"], ["a", "b", "a"], ["d"]],
    ),
    "unique items of a referenced enum": (
        {
            "type": "array", "items": {"$ref": "#/$defs/k"}, "uniqueItems": True, "minItems": 1,
            "$defs": {"k": {**KIND, "title": "K"}},
        },
        [["a"], ["b", "a"]],
        [[], ["a", "a"]],
    ),
    "at most one item": ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[], [1]], [[1, 1]]),
    "names of an enum": (
        {"type": "object", "additionalProperties": NUMBER, "propertyNames": KIND},
        [{}, {"a": 1}, {"a": 1, "b": 2}],
        [{"c": 1}, {"a": "x"}],
    ),
    "names with a pattern": (
        {"type": "object", "additionalProperties": NUMBER, "propertyNames": {"pattern": "^[a-c]+$"}},
        [{}, {"ab": 1}],
        [{"d": 1}, {"a": "x"}],
    ),
    "names with a length": (
        {"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}}, [{}, {"ab": 1}], [{"a": 1}, {"abcd": 1}]
    ),
    "unevaluatedProperties": ({**obj(a=NUMBER), "unevaluatedProperties": False}, [{"a": 1}], [{"b": 1}]),
    "number of properties that is required": (
        {**obj(a=NUMBER, b=NUMBER), "required": ["a"], "minProperties": 1, "maxProperties": 2},
        [{"a": 1}, {"a": 1, "b": 1}],
        [{}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_keywords_that_are_rewritten_are_enforced(
    name: str, grammar: Callable[[Any], tuple[Accepts, list[str]]]
) -> None:
    schema, good, bad = EXACT[name]
    accepts, relaxed = grammar(schema)
    assert relaxed == []
    assert [value for value in good if not accepts(value)] == []
    assert [value for value in bad if accepts(value)] == []


RELAXED: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "uniqueItems": ({"type": "array", "items": STRING, "uniqueItems": True}, [["a", "b"]], [["a", 1]]),
    "oneOf": ({"oneOf": [INTEGER, {"type": "number", "minimum": 5}]}, [3, 5.5], ["a", 4.5]),
    "contains": (
        {"type": "array", "items": {"type": ["string", "number"]}, "contains": STRING}, [["a"], [1, "a"]], [[], [None]]
    ),
    "not": ({"type": "string", "not": {"pattern": "^a"}}, ["b"], [1]),
    "if": ({**obj(a=NUMBER, b=NUMBER), "if": {"properties": {"a": {"minimum": 1}}}, "then": {"required": ["b"]}},
           [{"a": 1, "b": 1}, {"a": 0}], [{"a": "x"}]),
    "pattern": ({"type": "string", "pattern": "^(?!a)[a-z]+$", "maxLength": 3}, ["b"], ["bbbb"]),
    "minProperties": (
        {**obj(a=NUMBER, b=NUMBER, c=NUMBER), "minProperties": 2}, [{"a": 1, "b": 2}], [{"a": "x", "b": 2}]
    ),
    "patternProperties": (
        {**obj(a=NUMBER), "patternProperties": {"^b": NUMBER, "c$": STRING}}, [{"a": 1, "b": 1}], [{"a": "x"}]
    ),
    "unevaluatedProperties": (
        {**obj(a=NUMBER), "anyOf": [obj(b=STRING)], "unevaluatedProperties": False}, [{"a": 1, "b": "x"}], [{"a": "x"}]
    ),
    "propertyNames": (
        {**obj(a=NUMBER), "propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": NUMBER},
        [{"a": 1, "b": 1}], [{"a": "x"}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RELAXED)
def test_keywords_that_cannot_be_enforced_are_named_and_refused_by_strict(
    name: str, tokenizer: Any, grammar: Callable[[Any], tuple[Accepts, list[str]]]
) -> None:
    schema, good, bad = RELAXED[name]
    accepts, relaxed = grammar(schema)
    assert relaxed == [name]
    assert all(jsonschema.Draft202012Validator(schema).is_valid(value) for value in good)
    assert [value for value in good if not accepts(value)] == []
    assert [value for value in bad if accepts(value)] == []
    nested = obj(p=schema)
    assert compiled(tokenizer, nested).relaxations == (f"{name} (at #/properties/p)",)
    error = compiled(tokenizer, {**nested, STRICT_KEY: True}).error
    assert error is not None and error.startswith("strict is true") and f"{name} at #/properties/p" in error


@pytest.mark.parametrize("name", ["path", "binary", "password", "uuid4", "uri-reference", "regex", "\r\n☃", "x" * 999])
@pytest.mark.parametrize("strict", [False, True])
def test_unknown_formats_are_annotations(name: str, strict: bool, tokenizer: Any) -> None:
    result = compiled(tokenizer, {**obj(p={"type": "string", "format": name}), STRICT_KEY: strict})
    assert result.error is None
    [relaxation] = result.relaxations
    assert relaxation.startswith("format '") and relaxation.endswith("' (at #/properties/p)") and len(relaxation) < 80
    assert relaxation.isprintable()


@pytest.mark.parametrize("name", sorted(KNOWN_FORMATS))
def test_known_formats_are_enforced(name: str, grammar: Callable[[Any], tuple[Accepts, list[str]]]) -> None:
    accepts, relaxed = grammar({"type": "string", "format": name})
    assert relaxed == [] and (name == "unknown") == accepts("a b")


def test_a_union_of_many_overlapping_types_stays_small(tokenizer: Any) -> None:
    """Rewrites that multiply alternatives are limited; what is beyond the limit is named."""
    names = [f"p{i}" for i in range(40)]
    schema = {**obj(**dict.fromkeys(names, NUMBER)), "dependentRequired": {name: ["p0"] for name in names[1:]}}
    result = compiled(tokenizer, schema)
    assert result.error is None and {keyword(each) for each in result.relaxations} == {"dependentRequired"}


def test_options_of_the_library_drop_nothing_in_silence(tokenizer: Any) -> None:
    schema = {"x-guidance": {"lenient": True, "coerce_one_of": True}, "oneOf": [INTEGER, NUMBER]}
    assert compiled(tokenizer, schema).relaxations == ("oneOf (at #)",)


def test_other_documents_are_not_fetched(tokenizer: Any) -> None:
    assert "retriev" in str(compiled(tokenizer, {"$ref": "http://localhost:1/schema"}).error)


def test_references_to_places_that_are_not_schemas_are_rewritten_too(tokenizer: Any) -> None:
    schema = {"$ref": "#/components/point", "components": {"point": obj(x={"type": "string", "format": "path"})}}
    result = compiled(tokenizer, schema)
    assert result.error is None and result.relaxations == ("format 'path' (at #/components/point/properties/x)",)

"""Every route of the server has a request and a response in docs/reference/http, as `/openapi.json` describes them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.helpers.response_schemas import ResponseChecker, api_document
from tests.unit.docs import http_examples
from tests.unit.docs.every_part import needs_every_part

RECORDS = json.loads(http_examples.FILE.read_text("utf-8"))


@needs_every_part
def test_every_route_has_an_example_on_a_page() -> None:
    names = [name for _, name in http_examples.example_names()]
    assert len(set(names)) == len(names)
    routes = set(http_examples.routes())
    assert routes <= RECORDS.keys()
    assert routes - set(names) == http_examples.SAME.keys()
    assert set(names) <= RECORDS.keys() and set(http_examples.SAME.values()) <= set(names)
    for route, same in http_examples.SAME.items():
        one, other = (http_examples.keys_of(RECORDS[each]["response"]) for each in (route, same))
        assert one == other, route


def test_the_examples_of_the_pages_are_those_of_the_file() -> None:
    for path, text in http_examples.pages():
        assert path.read_text("utf-8") == text, "run: python -m tests.unit.docs.http_examples"


@needs_every_part
def test_the_examples_are_as_openapi_json_describes_them() -> None:
    http_examples.check(RECORDS)


@needs_every_part
def test_all_operations_describe_their_responses_and_the_schemas_are_valid() -> None:
    document = api_document()
    schemas = document["components"]["schemas"]
    operations = [each for path in document["paths"].values() for each in path.values()]
    assert len(operations) >= 70
    assert len({each["operationId"] for each in operations}) == len(operations)
    for operation in operations:
        for status, response in operation["responses"].items():
            assert response.get("content"), f"{operation['operationId']}: {status}"
    for name, schema in schemas.items():
        assert name.isidentifier() and schema.get("title", name) == name
        jsonschema.Draft202012Validator.check_schema(schema)
    text = json.dumps(document)
    assert "Response" not in schemas  # the class of any response in clients that openapi-python-client generates
    for schema in objects_of(document):
        assert schema.get("type") != "array" or "items" in schema, f"generators reject {schema}"
        values = schema.get("enum", [])
        assert isinstance(values, dict) or all(isinstance(each, str) for each in values), f"generators reject {schema}"
    for reference in {each.split('"')[0] for each in text.split('"$ref": "#/components/schemas/')[1:]}:
        assert reference in schemas


def objects_of(value: Any) -> Iterator[dict[str, Any]]:
    """All objects in a value of JSON."""
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from objects_of(each)


@pytest.mark.parametrize("wrong", [{"more": 1}, {"usage": None}, {"choices": [{"index": 0}]}])
def test_a_response_that_is_not_as_described_is_found(wrong: dict[str, object]) -> None:
    checker = ResponseChecker(api_document())
    record = copy.deepcopy(RECORDS["POST /v1/completions"])
    arguments = ("POST", record["path"], 200, "application/json")
    assert checker.check(*arguments, json.dumps(record["response"]).encode(), anthropic=False)
    with pytest.raises(AssertionError, match="POST /v1/completions: 200"):
        checker.check(*arguments, json.dumps(record["response"] | wrong).encode(), anthropic=False)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@needs_every_part
def test_a_new_record_has_the_fields_of_the_examples() -> None:
    found = http_examples.record_all()
    assert {name: http_examples.keys_of(each) for name, each in found.items()} == {
        name: http_examples.keys_of(each) for name, each in RECORDS.items()
    }

"""Validation of outputs whose schema was not enforced whole: what it finds, and that hostile schemas stay bounded."""

from __future__ import annotations

import asyncio
import http.server
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from mvllm import StructuredOutputsParams
from mvllm.structured_output.additional_properties import STRICT_KEY
from mvllm.structured_output.output_validator import OutputValidator, TextToValidate

UNIQUE = {"type": "array", "uniqueItems": True}


@dataclass
class Output:
    warnings: list[str] | None = None


@pytest.fixture(scope="module")
def validator() -> Iterator[OutputValidator]:
    validator = OutputValidator()
    yield validator
    validator.close()


def job(schema: Any, text: str, **more: Any) -> TextToValidate:
    return TextToValidate.of(StructuredOutputsParams(json=schema, **more), text, ["uniqueItems (at #)"])


def warnings_of(validator: OutputValidator, schema: Any, text: str, **more: Any) -> list[str]:
    output = Output()
    validator.validate([(output, job(schema, text, **more))])
    assert output.warnings is not None
    return output.warnings


def test_what_is_not_satisfied_is_named_with_its_place(validator: OutputValidator) -> None:
    assert warnings_of(validator, UNIQUE, "[1, 2]") == []
    assert warnings_of(validator, {**UNIQUE, STRICT_KEY: True}, " [1, 2]</s>") == []
    [warning] = warnings_of(validator, {"properties": {"a": UNIQUE}}, '{"a": [1, 1]}')
    assert warning == "The output does not satisfy uniqueItems at #/a: [1, 1] has non-unique elements"
    long = warnings_of(validator, {"items": UNIQUE}, json.dumps([["x" * 999] * 2] * 99))
    assert len(long) == 8 and all(len(each) < 300 for each in long)


def test_the_rules_of_the_schemas_draft_apply(validator: OutputValidator) -> None:
    schema = {"dependencies": {"a": ["b"]}}
    for draft in ("http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema"):
        assert "dependencies" in warnings_of(validator, {"$schema": draft, **schema}, '{"a": 1}')[0]
    assert warnings_of(validator, {"format": "ipv4"}, '"x"') == []  # an annotation


@pytest.mark.parametrize(
    ("text", "more"),
    [
        ("<think>[1, 1]</think>\n[1]", {"thoughts_start": "<think>", "thoughts_end": "</think>"}),
        ("[1, 1] perhaps</think>[1]", {"thoughts_end": "</think>"}),
        ("[1]", {"thoughts_start": "<think>", "thoughts_end": "</think>"}),
    ],
)
def test_only_what_follows_the_reasoning_is_validated(
    validator: OutputValidator, text: str, more: dict[str, str]
) -> None:
    assert warnings_of(validator, UNIQUE, text, **more) == []


def test_other_constraints_and_broken_texts_are_named_as_not_validated(validator: OutputValidator) -> None:
    assert "not validated against uniqueItems (at #): " in warnings_of(validator, UNIQUE, "[1")[0]
    output = Output()
    validator.validate(
        [(output, TextToValidate.of(StructuredOutputsParams(grammar="start: /x/"), "x", ["not (at #)"]))]
    )
    assert output.warnings == ["The output was not validated against not (at #): it is not one JSON text."]


def warnings_of_calls(validator: OutputValidator, text: str, **more: str) -> list[str]:
    """The warnings of a text with calls of two functions and one whose arguments are not JSON."""
    lists = {"type": "object", "properties": {"a": UNIQUE}}
    structures = [
        {"begin": "<call=f>", "schema": lists, "end": "</call>"},
        {"begin": "<call=first>", "schema": {"not": {"required": ["b"]}}, "end": "</call>"},
        {"begin": "<n>", "schema": lists, "end": "</n>", "style": "numbered_json", "separator": ":"},
        {"begin": "<x>", "schema": lists, "end": "</x>", "style": "qwen_xml"},
    ]
    tag = {"structures": structures, "triggers": ["<call=", "<n>", "<x>"]}
    output, params = Output(), StructuredOutputsParams(structural_tag=tag, **more)
    validator.validate([(output, TextToValidate.of(params, text, ["uniqueItems (at #)"]))])
    assert output.warnings is not None
    return output.warnings


def test_the_calls_of_a_structural_tag_are_validated_one_by_one(validator: OutputValidator) -> None:
    assert warnings_of_calls(validator, "No call at all: [1, 1].") == []
    fine = 'Well. <call=f>{"a": [1, 2]}</call> And <call=first>{"a": [1, 1]}</call>'
    assert warnings_of_calls(validator, fine) == []
    assert warnings_of_calls(validator, f'{fine}<call=f> {{"a": ["<call=first>", 1, 1]}}</call>') == [
        "The output does not satisfy uniqueItems at #/a of call 3: ['<call=first>', 1, 1] has non-unique elements"
    ]
    [first, second] = warnings_of_calls(validator, '<n>7:{"a": [3, 3]}</n><call=first>{"b": 1}</call>')
    assert "at #/a of call 1: [3, 3]" in first and "satisfy not at # of call 2" in second
    thought = '<call=f>{"a": [1, 1]}</call></think><call=f>{"a": []}</call>'
    assert warnings_of_calls(validator, thought, thoughts_end="</think>") == []


def test_calls_whose_arguments_are_not_json_are_named_as_not_validated(validator: OutputValidator) -> None:
    [warning] = warnings_of_calls(validator, "<x><parameter=a>\n[1, 1]\n</parameter></x>")
    assert warning.startswith("The output was not validated against uniqueItems (at #): ") and "not JSON" in warning
    assert "not validated" in warnings_of_calls(validator, "<call=f>{")[0]


def test_hostile_schemas_are_bounded_and_the_next_output_is_validated(validator: OutputValidator) -> None:
    slow = {"type": "string", "pattern": "^(a+)+$"}
    bounded = r"it takes more than 1 s|it took longer than 8 s"  # of processor time; of time, on a busy machine
    for _ in range(2):  # the second time at once
        assert re.search(bounded, warnings_of(validator, slow, '"%sb"' % ("a" * 40))[0])
    deep: dict[str, Any] = {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}
    assert "not validated" in warnings_of(validator, deep, "1")[0]
    assert warnings_of(validator, UNIQUE, "[1]") == []


def test_nothing_is_fetched(validator: OutputValidator) -> None:
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(404)
            self.end_headers()

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        schema = {"$ref": f"http://127.0.0.1:{server.server_port}/schema"}
        assert "Unresolvable" in warnings_of(validator, schema, "1")[0]
        server.shutdown()
    assert asked == []


def test_many_outputs_in_an_event_loop(validator: OutputValidator) -> None:
    outputs = [Output() for _ in range(20)]
    jobs = [(output, job(UNIQUE, f"[1, {i}]")) for i, output in enumerate(outputs)]
    asyncio.run(validator.validate_async(jobs))
    assert [len(output.warnings or ()) for output in outputs] == [0, 1, *[0] * 18]


def test_a_clients_slow_schemas_delay_others_by_one_of_them(
    validator: OutputValidator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mvllm.structured_output.output_validator.MAX_WAIT_SECONDS", 60.0)
    slow = [{"type": "string", "pattern": f"^(a|a)*{i}$", "uniqueItems": True} for i in range(2)]
    ended: list[str] = []

    async def validate(client: str, jobs: list[tuple[Output, TextToValidate]]) -> None:
        await validator.validate_async([(output, each) for output, each in jobs], client)
        ended.append(client)

    async def run() -> Output:
        output = Output()
        hostile = [validate("hostile", [(Output(), job(schema, json.dumps("a" * 40)))]) for schema in slow]
        await asyncio.gather(*hostile, validate("other", [(output, job(UNIQUE, "[1, 1]"))]))
        return output

    assert "non-unique" in str(asyncio.run(run()).warnings)
    assert ended.index("other") <= 1


def test_a_closed_validator_says_so() -> None:
    validator = OutputValidator()
    validator.close()
    assert "shutting down" in warnings_of(validator, UNIQUE, "[1]")[0]

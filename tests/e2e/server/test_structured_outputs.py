"""Structured outputs over HTTP: the output matches the constraint, and an unusable constraint is an error."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any, Literal

import httpx2
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from tests.helpers.server import ServerProcess, as_before, wait_idle

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
STORY = {"model": "demo", "prompt": "Once upon a time", "temperature": 1.0, "seed": 3, "max_tokens": 80}
QUESTION: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is the capital of Italy?"}],
    "temperature": 1.0,
    "seed": 3,
    "max_tokens": 80,
}
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "on": {"type": "boolean"}},
    "required": ["x", "on"],
    "additionalProperties": False,
}
POINT_FORMAT = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT}}
NO_SCHEMA = {"type": "json_schema", "json_schema": {"name": "point", "schema": {"type": "made up"}}}
SLOW = {"type": "integer", "multipleOf": 999983}  # compiling it takes many seconds and much memory
DEEP = json.loads('{"not":' * 90 + "{}" + "}" * 90)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": POINT}}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": POINT}}
ROOM = 500  # a call with the maximum amount of white space
NAMED = {"type": "function", "function": {"name": "weather"}}


class City(BaseModel):
    kind: Literal["town", "village"]
    is_big: bool
    trams: int = Field(ge=0, le=9)


@pytest.fixture(autouse=True)
def works_as_before(server: ServerProcess, client: httpx2.Client) -> Iterator[None]:
    with as_before(server, client):
        yield


@pytest.fixture(scope="module")
def sdk(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


def events(client: httpx2.Client, path: str, ask: dict[str, Any]) -> list[dict[str, Any]]:
    answer = client.post(path, json={**ask, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.text.endswith("data: [DONE]\n\n")
    return [json.loads(line[6:])["choices"][0] for line in answer.text.split("\n\n") if line.startswith("data: {")]


def complete_and_stream(client: httpx2.Client, path: str, ask: dict[str, Any]) -> tuple[str, str]:
    """Text and finish reason of an answer; asserts that the streamed answer is the same."""
    answer = client.post(path, json=ask)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    pieces = events(client, path, ask)
    if path == CHAT:
        text, streamed = choice["message"]["content"], "".join(each["delta"].get("content") or "" for each in pieces)
    else:
        text, streamed = choice["text"], "".join(each["text"] for each in pieces)
    assert (streamed, pieces[-1]["finish_reason"]) == (text, choice["finish_reason"])
    return text, choice["finish_reason"]


def error_of_400(client: httpx2.Client, path: str, ask: dict[str, Any]) -> dict[str, Any]:
    """The error of a 400; asserts that a stream gets the same."""
    answers = [client.post(path, json={**ask, "stream": stream}) for stream in (False, True)]
    assert [answer.status_code for answer in answers] == [400, 400], [answer.text for answer in answers]
    assert answers[0].json() == answers[1].json() and answers[1].headers["content-type"] == "application/json"
    error: dict[str, Any] = answers[0].json()["error"]
    assert error["message"] and error["type"] == "BadRequestError"
    return error


def test_parse_returns_a_pydantic_model(sdk: OpenAI) -> None:
    ask: dict[str, Any] = {
        "messages": QUESTION["messages"],
        "model": "demo",
        "temperature": 1.0,
        "seed": 3,
        "max_tokens": ROOM,
    }
    answer = sdk.chat.completions.parse(**ask, response_format=City)
    assert isinstance(answer.choices[0].message.parsed, City) and answer.choices[0].finish_reason == "stop"
    with sdk.chat.completions.stream(**ask, response_format=City) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, City)


@pytest.mark.parametrize(("path", "ask"), [(COMPLETIONS, STORY), (CHAT, QUESTION)], ids=["completions", "chat"])
class TestForms:
    def test_a_schema(self, client: httpx2.Client, path: str, ask: dict[str, Any]) -> None:
        text, reason = complete_and_stream(client, path, {**ask, "response_format": POINT_FORMAT, "max_tokens": ROOM})
        point = json.loads(text)
        assert reason == "stop" and list(point) == ["x", "on"]
        assert 0 <= point["x"] <= 99 and isinstance(point["on"], bool)

    def test_an_object(self, client: httpx2.Client, path: str, ask: dict[str, Any]) -> None:
        text, reason = complete_and_stream(client, path, {**ask, "response_format": {"type": "json_object"}})
        assert text.startswith("{") and (reason == "length" or isinstance(json.loads(text), dict))

    def test_response_format_text_leaves_the_output_free(
        self, client: httpx2.Client, path: str, ask: dict[str, Any]
    ) -> None:
        ask = {**ask, "max_tokens": 12}
        free = complete_and_stream(client, path, ask)
        assert complete_and_stream(client, path, {**ask, "response_format": {"type": "text"}}) == free
        assert complete_and_stream(client, path, {**ask, "response_format": None, "structured_outputs": None}) == free

    def test_a_pattern_a_choice_and_a_grammar(self, client: httpx2.Client, path: str, ask: dict[str, Any]) -> None:
        text, reason = complete_and_stream(client, path, {**ask, "structured_outputs": {"regex": "[a-f]{3}-[0-9]{4}"}})
        assert re.fullmatch("[a-f]{3}-[0-9]{4}", text) and reason == "stop"
        choices = ["Rome", "Paris", 'the "sea"']
        text, reason = complete_and_stream(client, path, {**ask, "structured_outputs": {"choice": choices}})
        assert text in choices and reason == "stop"
        text, reason = complete_and_stream(
            client, path, {**ask, "structured_outputs": {"grammar": 'root ::= "a" [0-9] "b"'}}
        )
        assert re.fullmatch("a[0-9]b", text) and reason == "stop"

    def test_a_constraint_after_reasoning(self, client: httpx2.Client, path: str, ask: dict[str, Any]) -> None:
        """Free up to the first dot, like reasoning up to its end tag."""
        form = {"regex": "[0-9]{3}-[a-f]{2}", "thoughts_end": "."}
        text, reason = complete_and_stream(client, path, {**ask, "structured_outputs": form, "max_tokens": 300})
        assert re.fullmatch(r"[^.]*\.\s*[0-9]{3}-[a-f]{2}", text) and reason == "stop"

    def test_a_structural_tag(self, client: httpx2.Client, path: str, ask: dict[str, Any]) -> None:
        """Every letter e triggers it, so the text contains many."""
        tag = {"begin": "e[", "schema": {"enum": [7, 8]}, "end": "]"}
        form = {"type": "structural_tag", "structures": [tag], "triggers": ["e"]}
        text, _ = complete_and_stream(client, path, {**ask, "response_format": form, "min_tokens": 60})
        assert "e[" in text and re.fullmatch(r"([^e]|e\[[78]\])*(e(\[([78]\]?)?)?)?", text)

    def test_the_deprecated_fields(
        self, server: ServerProcess, client: httpx2.Client, path: str, ask: dict[str, Any]
    ) -> None:
        for more, pattern in (
            ({"guided_regex": "[a-f]{3}-[0-9]{4}"}, "[a-f]{3}-[0-9]{4}"),
            ({"guided_choice": ["Rome", "Paris"]}, "Rome|Paris"),
            ({"guided_grammar": 'root ::= "a" [0-9] "b"'}, "a[0-9]b"),
        ):
            text, reason = complete_and_stream(client, path, {**ask, **more})
            assert re.fullmatch(pattern, text) and reason == "stop"
        text, _ = complete_and_stream(client, path, {**ask, "guided_json": POINT, "max_tokens": ROOM})
        assert set(json.loads(text)) == {"x", "on"}
        assert server.log.count("guided_json in requests is deprecated") == 1

    @pytest.mark.parametrize(
        ("more", "param"),
        [
            ({"response_format": NO_SCHEMA}, "response_format"),
            ({"response_format": {"type": "json_schema"}}, "response_format"),
            ({"response_format": {"type": "structural_tag"}}, "response_format"),
            ({"response_format": {"type": 5}}, "response_format"),
            ({"structured_outputs": {"json": {"type": "made up"}}}, "structured_outputs"),
            ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
            ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
            ({"structured_outputs": {"made_up": "a"}}, "structured_outputs"),
            ({"structured_outputs": {}}, "structured_outputs"),
            ({"structured_outputs": {"regex": "a"}, "response_format": POINT_FORMAT}, "structured_outputs"),
            ({"guided_regex": "(a"}, "guided_regex"),
            ({"guided_choice": "a"}, "guided_choice"),
            ({"guided_regex": "a+", "structured_outputs": {"regex": "a"}}, "guided_regex"),
        ],
        ids=range(13),
    )
    def test_invalid_constraints_are_rejected_by_name(
        self, client: httpx2.Client, path: str, ask: dict[str, Any], more: dict[str, Any], param: str
    ) -> None:
        assert error_of_400(client, path, {**ask, **more})["param"] == param


def test_structured_output_applies_to_every_prompt_and_sequence(client: httpx2.Client) -> None:
    ask = {**STORY, "prompt": ["One", "Two", "Three"], "n": 2, "structured_outputs": {"regex": "[a-z]{2}[0-9]{4}"}}
    choices = client.post(COMPLETIONS, json=ask).json()["choices"]
    texts = [choice["text"] for choice in choices]
    assert [choice["index"] for choice in choices] == list(range(6)) and len(set(texts)) > 1
    assert all(re.fullmatch("[a-z]{2}[0-9]{4}", text) for text in texts)
    streamed = [""] * 6
    for piece in events(client, COMPLETIONS, ask):
        streamed[piece["index"]] += piece["text"]
    assert streamed == texts


@pytest.mark.parametrize(
    "form",
    [
        {"json": SLOW},
        {"json": DEEP},
        {"json": {"enum": [f"value {i}" for i in range(100_000)]}},
        {"grammar": 'start: start "a" | start'},
        {"json": {"enum": [{"id": i, "name": f"n{i}"} for i in range(4000)]}},
    ],
    ids=["slow", "deep", "large", "left-recursive", "wide"],
)
def test_a_hostile_constraint_is_aborted_and_other_requests_are_answered(
    server: ServerProcess, client: httpx2.Client, form: dict[str, Any]
) -> None:
    """The limit is far above the 3 s of CPU time that compiling may take, and far below what these would take."""
    start = time.monotonic()
    answer = client.post(COMPLETIONS, json={**STORY, "max_tokens": 4, "structured_outputs": form})
    assert time.monotonic() - start < 100
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "structured_outputs", answer.text
    assert complete_and_stream(client, COMPLETIONS, {**STORY, "max_tokens": 4})[1] == "length"
    # Two sandboxes that compile grammars, that of the model's chat template, and the one that validates outputs.
    assert len(server.sandbox_pids()) <= 4
    assert re.fullmatch(
        "[xy]{4}", complete_and_stream(client, CHAT, {**QUESTION, "structured_outputs": {"regex": "[xy]{4}"}})[0]
    )


def test_an_ambiguous_grammar_is_an_error_of_its_request(client: httpx2.Client) -> None:
    """Each token makes the next more expensive, without limit."""
    form = {"grammar": 'start: s\ns: s s | "a" |'}
    answer = client.post(COMPLETIONS, json={**STORY, "max_tokens": 900, "min_tokens": 900, "structured_outputs": form})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "structured_outputs"
    assert "processor time" in error["message"]


def test_other_requests_do_not_wait_for_a_slow_constraint_and_a_disconnect_aborts_it(
    server: ServerProcess, client: httpx2.Client
) -> None:
    slow = {**STORY, "stream": True, "structured_outputs": {"json": {**SLOW, "multipleOf": 999979}}}
    with server.client(timeout=0.3) as impatient, pytest.raises(httpx2.TimeoutException):
        impatient.post(COMPLETIONS, json=slow)
    assert client.post(COMPLETIONS, json={**STORY, "max_tokens": 4}).status_code == 200
    wait_idle(client)


EMPTY = {"type": "string", "maxLength": 0}
TWICE = {"type": "array", "items": EMPTY, "uniqueItems": True, "minItems": 2, "maxItems": 2}
"""Every text that follows what is enforced of it is ["", ""], which is not unique."""
ONE_KEY = {"type": "object", "properties": {"x": {"enum": [1]}}, "required": ["x"]}
NOT_ENFORCED = "x-mvllm-not-enforced"


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, **more}}


def ways_to_send(schema: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    """Path and body of a request with the schema, in every form."""
    limit = {"max_tokens": ROOM}
    function = {"name": "f", "parameters": {"type": "object", "properties": {"p": schema}, "required": ["p"]}}
    return {
        "completions": (COMPLETIONS, {**STORY, **limit, "response_format": schema_format(schema)}),
        "chat": (CHAT, {**QUESTION, **limit, "response_format": schema_format(schema), "n": 2}),
        "structured_outputs": (CHAT, {**QUESTION, **limit, "structured_outputs": {"json": schema}}),
        "guided_json": (CHAT, {**QUESTION, **limit, "guided_json": schema}),
        "tools": (CHAT, {**QUESTION, **limit, "tools": [{"type": "function", "function": function}],
                         "tool_choice": {"type": "function", "function": {"name": "f"}}}),
    }  # fmt: skip


def answers(client: httpx2.Client, path: str, ask: dict[str, Any]) -> list[tuple[httpx2.Response, dict[str, Any]]]:
    """The whole answer, and the streamed one with the object that ends it."""
    whole, streamed = (client.post(path, json={**ask, "stream": stream}) for stream in (False, True))
    assert whole.status_code == streamed.status_code == 200, whole.text
    lines = [line.removeprefix("data: ") for line in streamed.text.splitlines() if "{" in line]
    objects = [json.loads(line) for line in lines if line.startswith("{")]
    return [(whole, whole.json()), (streamed, objects[-1])]


class TestWhatIsNotEnforced:
    @pytest.mark.parametrize("way", ways_to_send(TWICE))
    def test_it_is_named_and_the_result_is_validated(self, client: httpx2.Client, way: str) -> None:
        path, ask = ways_to_send(TWICE)[way]
        for answer, last in answers(client, path, ask):
            assert answer.headers[NOT_ENFORCED] == "uniqueItems"
            [warning] = last["warnings"]
            assert re.fullmatch("The output does not satisfy uniqueItems at #.*: .* has non-unique elements", warning)
            for choice in last.get("choices", ()):
                assert choice["finish_reason"] == "stop"

    def test_a_result_that_satisfies_all_has_no_warning(self, client: httpx2.Client) -> None:
        path, ask = ways_to_send({**EMPTY, "not": {"pattern": "x"}})["chat"]
        for answer, last in answers(client, path, ask):
            assert answer.headers[NOT_ENFORCED] == "not" and last["warnings"] == []

    @pytest.mark.parametrize("way", [way for way in ways_to_send(True) if way != "completions"])
    def test_objects_have_no_keys_that_are_not_declared(self, client: httpx2.Client, way: str) -> None:
        path, ask = ways_to_send(ONE_KEY)[way]
        answer = client.post(path, json={**ask, "stream": False})
        assert NOT_ENFORCED not in answer.headers and "warnings" not in answer.json()
        text = re.sub(r"\\[nt]|\s", "", answer.text).replace('\\"', '"')  # JSON in a string, or an object
        objects = re.findall(r'\{"x":[^{}]*\}', text)
        assert objects and set(objects) == {'{"x":1}'}

    @pytest.mark.parametrize("way", ["completions", "tools"])
    def test_an_unknown_format_is_an_annotation(self, client: httpx2.Client, way: str) -> None:
        path, ask = ways_to_send({**EMPTY, "format": "path"})[way]
        for answer, last in answers(client, path, ask):
            assert answer.headers[NOT_ENFORCED] == "format" and "warnings" not in last

    def test_a_truncated_result_is_not_validated(self, client: httpx2.Client) -> None:
        ask = {**STORY, "max_tokens": 2, "response_format": schema_format(TWICE)}
        answer = client.post(COMPLETIONS, json=ask)
        assert answer.json()["choices"][0]["finish_reason"] == "length" and "warnings" not in answer.json()

    def test_each_prompts_results_are_validated(self, client: httpx2.Client) -> None:
        ask = {**STORY, "max_tokens": ROOM, "prompt": ["One", "Two"], "n": 2, "response_format": schema_format(TWICE)}
        for _, last in answers(client, COMPLETIONS, ask):
            assert len(last["warnings"]) == 1  # the same of all four

    def test_it_is_validated_after_reasoning(self, client: httpx2.Client) -> None:
        form = {"json": TWICE, "thoughts_end": "."}
        answer = client.post(COMPLETIONS, json={**STORY, "max_tokens": 400, "structured_outputs": form})
        assert "uniqueItems" in answer.json()["warnings"][0]

    def test_strict_refuses_it_by_name(self, client: httpx2.Client) -> None:
        ask = {**QUESTION, "response_format": schema_format(TWICE, strict=True)}
        error = error_of_400(client, CHAT, ask)
        assert error["param"] == "response_format" and "uniqueItems at #" in error["message"]
        function = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {"p": TWICE}}}
        ask = {**QUESTION, "tools": [{"type": "function", "function": function}], "tool_choice": "required"}
        error = error_of_400(client, CHAT, ask)
        assert error["param"] == "tools" and "uniqueItems at #" in error["message"]

    def test_strict_accepts_unknown_formats(self, client: httpx2.Client) -> None:
        schema = {**EMPTY, "format": "binary"}
        ask = {**QUESTION, "max_tokens": ROOM, "response_format": schema_format(schema, strict=True)}
        assert client.post(CHAT, json=ask).json()["choices"][0]["message"]["content"] == '""'
        parameters = {"type": "object", "properties": {"p": schema}, "required": ["p"]}
        tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}
        ask = {**QUESTION, "max_tokens": ROOM, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
        [call] = client.post(CHAT, json=ask).json()["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"p": ""}


class TestForcedCalls:
    def test_a_named_function_is_called(self, client: httpx2.Client) -> None:
        ask = {**QUESTION, "tools": [WEATHER, CLOCK], "tool_choice": NAMED, "max_tokens": ROOM}
        [choice] = client.post(CHAT, json=ask).json()["choices"]
        [call] = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "weather" and set(json.loads(call["function"]["arguments"])) == {"x", "on"}
        assert choice["finish_reason"] == "stop" and choice["message"]["content"] is None

    def test_any_function_is_called(self, client: httpx2.Client) -> None:
        tools = {"tools": [WEATHER, CLOCK], "tool_choice": "required", "parallel_tool_calls": False}
        ask = {**QUESTION, **tools, "max_tokens": ROOM}
        [choice] = client.post(CHAT, json=ask).json()["choices"]
        [call] = choice["message"]["tool_calls"]
        assert call["function"]["name"] in ("weather", "clock") and call["id"].startswith("call_")
        assert set(json.loads(call["function"]["arguments"])) == {"x", "on"} and choice["finish_reason"] == "tool_calls"
        pieces = events(client, CHAT, ask)
        opening, *rest = [piece for each in pieces for piece in each["delta"].get("tool_calls", ())]
        arguments = opening["function"]["arguments"] + "".join(piece["function"]["arguments"] for piece in rest)
        assert (opening["function"]["name"], arguments) == (call["function"]["name"], call["function"]["arguments"])
        assert pieces[-1]["finish_reason"] == "tool_calls"

    def test_a_truncated_call_has_finish_reason_length(self, client: httpx2.Client) -> None:
        ask = {**QUESTION, "tools": [WEATHER], "tool_choice": "required", "max_tokens": 3}
        assert client.post(CHAT, json=ask).json()["choices"][0]["finish_reason"] == "length"

    @pytest.mark.parametrize(
        ("more", "param"),
        [
            ({"tools": None}, "tool_choice"),
            ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
            ({"response_format": POINT_FORMAT}, "tool_choice"),
            ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "made up"}}}]}, "tools"),
            ({"tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}]}, "tools"),
        ],
        ids=["no tools", "no such", "two forms", "no schema", "deep"],
    )
    def test_invalid_tool_choices_are_rejected(self, client: httpx2.Client, more: dict[str, Any], param: str) -> None:
        ask = {**QUESTION, "tools": [WEATHER], "tool_choice": "required", **more}
        assert error_of_400(client, CHAT, ask)["param"] == param

    def test_structured_output_and_tool_choice_auto_exclude_each_other(self, client: httpx2.Client) -> None:
        ask = {**QUESTION, "tools": [WEATHER], "response_format": POINT_FORMAT, "max_tokens": ROOM}
        assert error_of_400(client, CHAT, ask)["param"] == "response_format"
        assert json.loads(complete_and_stream(client, CHAT, {**ask, "tool_choice": "none"})[0]).keys() == {"x", "on"}


def test_errors_are_the_exceptions_of_the_sdk(sdk: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.create(  # type: ignore[call-overload]
            model="demo", messages=QUESTION["messages"], response_format=NO_SCHEMA, stream=True
        )
    assert caught.value.param == "response_format" and "made up" in str(caught.value)

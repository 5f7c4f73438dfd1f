"""The Responses API with the real OpenAI SDK and a real server: its text is that of a chat completion."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx2
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from openai import OpenAI
from pydantic import BaseModel, Field

from mvllm_responses.protocol import ResponsesRequest
from tests.helpers.random_bodies import random_requests
from tests.helpers.server import SMALL, ServerProcess, wait_idle

QUESTION = "What is the capital of Italy?"
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"days": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["days"],
        "additionalProperties": False,
    },
}


class City(BaseModel):
    kind: Literal["town", "village"]
    trams: int = Field(ge=0, le=9)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    arguments = ("demo", "--port", "0", "--served-model-name", "demo", "little", *SMALL)
    with ServerProcess(tmp_path_factory.mktemp("server"), *arguments) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx2.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def sdk(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


def chat(sdk: OpenAI, *messages: tuple[str, str], **more: Any) -> Any:
    said = [{"role": role, "content": content} for role, content in messages]
    return sdk.chat.completions.create(model="demo", messages=said, temperature=0, **more)  # type: ignore[call-overload]


def test_a_response_has_the_text_of_a_chat_completion_with_and_without_stream(sdk: OpenAI) -> None:
    expected = chat(sdk, ("system", "Be brief."), ("user", QUESTION))
    ask: dict[str, Any] = {"model": "demo", "input": QUESTION, "instructions": "Be brief.", "temperature": 0}
    answer = sdk.responses.create(**ask)
    assert answer.output_text == expected.choices[0].message.content and answer.status == "completed"
    assert answer.id.startswith("resp_") and answer.model == "demo" and answer.error is None
    usage = answer.usage
    assert usage is not None and usage.input_tokens == expected.usage.prompt_tokens
    assert usage.output_tokens == expected.usage.completion_tokens
    events = list(sdk.responses.create(**ask, stream=True))
    kinds = [event.type for event in events]
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(pieces),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(pieces) == answer.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output_text == answer.output_text  # type: ignore[union-attr]


def test_a_long_response_arrives_while_it_is_generated(sdk: OpenAI) -> None:
    """Deltas that wait for a slow reader are merged, so a short answer may be a single delta."""
    ask: dict[str, Any] = {"model": "demo", "input": QUESTION, "max_output_tokens": 300, "stream": True}
    events = list(sdk.responses.create(**ask, extra_body={"ignore_eos": True}))
    assert sum(event.type == "response.output_text.delta" for event in events) > 1


def test_parse_returns_a_pydantic_model(sdk: OpenAI) -> None:
    ask: dict[str, Any] = {"model": "demo", "input": QUESTION, "max_output_tokens": 300, "text_format": City}
    assert isinstance(sdk.responses.parse(**ask).output_parsed, City)
    with sdk.responses.stream(**ask) as stream:
        assert isinstance(stream.get_final_response().output_parsed, City)


def test_a_truncated_response_is_incomplete(sdk: OpenAI) -> None:
    answer = sdk.responses.create(model="demo", input="Tell me a story.", max_output_tokens=2, temperature=0)
    assert answer.status == "incomplete" and answer.usage is not None and answer.usage.output_tokens == 2
    assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"


def test_a_conversation_continues_until_it_is_deleted(sdk: OpenAI) -> None:
    first = sdk.responses.create(model="demo", input=QUESTION, temperature=0)
    second = sdk.responses.create(model="demo", input="And of France?", previous_response_id=first.id, temperature=0)
    expected = chat(sdk, ("user", QUESTION), ("assistant", first.output_text), ("user", "And of France?"))
    assert second.output_text == expected.choices[0].message.content and second.previous_response_id == first.id
    assert sdk.responses.retrieve(first.id).output_text == first.output_text
    sdk.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.responses.create(model="demo", input="x", previous_response_id=first.id)
    assert caught.value.param == "previous_response_id"
    # The later response does not depend on the deleted one.
    assert sdk.responses.create(model="demo", input="x", previous_response_id=second.id, temperature=0).output_text


def test_a_required_function_call(sdk: OpenAI) -> None:
    answer = sdk.responses.create(  # type: ignore[call-overload]
        model="demo",
        input=QUESTION,
        tools=[WEATHER],
        tool_choice={"type": "function", "name": "weather"},
        max_output_tokens=300,
    )
    [call] = answer.output
    assert (call.type, call.name, set(json.loads(call.arguments))) == ("function_call", "weather", {"days"})


def test_a_running_response_can_be_read_and_cancelled(sdk: OpenAI, client: httpx2.Client) -> None:
    endless = {"ignore_eos": True, "min_tokens": 900}
    stream = sdk.responses.create(
        model="demo", input="Go on.", max_output_tokens=900, temperature=0, stream=True, extra_body=endless
    )
    found = iter(stream)
    response_id = next(found).response.id  # type: ignore[union-attr]
    assert sdk.responses.retrieve(response_id).status == "in_progress"
    assert sdk.responses.cancel(response_id).status == "cancelled"
    last = list(found)[-1]
    assert last.type == "response.incomplete" and last.response.status == "cancelled"
    assert sdk.responses.retrieve(response_id).status == "cancelled"
    wait_idle(client)


def test_an_unsupported_text_format_is_an_error_that_names_text(sdk: OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "made up"}}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            sdk.responses.create(model="demo", input="x", text=form, stream=stream)
        assert caught.value.param == "text"


def test_log_probabilities_belong_to_the_tokens_of_the_text(sdk: OpenAI) -> None:
    ask: dict[str, Any] = {"model": "demo", "input": QUESTION, "temperature": 0, "top_logprobs": 2}
    answer = sdk.responses.create(**ask, include=["message.output_text.logprobs"])
    part = answer.output[0].content[0]  # type: ignore[union-attr, index]
    assert b"".join(bytes(each.bytes) for each in part.logprobs).decode() == part.text  # type: ignore[union-attr]
    assert all(len(each.top_logprobs) >= 2 for each in part.logprobs)  # type: ignore[union-attr]
    events = list(sdk.responses.create(**ask, stream=True))
    deltas = [event.logprobs for event in events if event.type == "response.output_text.delta"]
    assert [each.token for entries in deltas for each in entries] == [each.token for each in part.logprobs]  # type: ignore


def check(client: httpx2.Client, path: str, body: dict[str, Any]) -> None:
    answer = client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert answer.status_code in (200, 400, 404), (path, body, answer.text)
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    elif body.get("stream"):
        last = json.loads(answer.text.rstrip().split("\n")[-1].removeprefix("data: "))
        assert last["type"] in ("response.completed", "response.incomplete") and last["response"]["error"] is None
    else:
        answer.json()


REQUESTS = random_requests({"/v1/responses": ResponsesRequest})
_CHECKS: dict[str, Any] = {"suppress_health_check": list(HealthCheck), "deadline": None}


@settings(max_examples=40, **_CHECKS)
@given(request=REQUESTS)
def test_no_random_body_causes_a_500(client: httpx2.Client, request: tuple[str, dict[str, Any]]) -> None:
    check(client, *request)


@pytest.mark.exhaustive
@settings(max_examples=2000, **_CHECKS)
@given(request=REQUESTS)
def test_none_of_many_random_bodies_causes_a_500(client: httpx2.Client, request: tuple[str, dict[str, Any]]) -> None:
    check(client, *request)


EMPTY = {"type": "string", "maxLength": 0}
TWICE = {"type": "array", "items": EMPTY, "uniqueItems": True, "minItems": 2, "maxItems": 2}


@pytest.mark.parametrize(
    ("schema", "name", "num_warnings"), [(TWICE, "uniqueItems", 1), ({**EMPTY, "not": {"pattern": "x"}}, "not", 0)]
)
def test_what_is_not_enforced_of_a_schema_is_named(
    client: httpx2.Client, schema: dict[str, Any], name: str, num_warnings: int
) -> None:
    text = {"format": {"type": "json_schema", "name": "s", "schema": schema}}
    for stream in (False, True):
        ask = {"input": "Hi", "text": text, "max_output_tokens": 500, "stream": stream}
        answer = client.post("/v1/responses", json=ask)
        assert answer.headers["x-mvllm-not-enforced"] == name
        response = json.loads(answer.text.rstrip().split("\n")[-1].removeprefix("data: ")) if stream else answer.json()
        assert len(response.get("response", response)["warnings"]) == num_warnings


def test_a_stored_completion_has_the_warnings_of_its_schema(client: httpx2.Client) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": TWICE}}
    messages = [{"role": "user", "content": "Hi"}]
    ask = {"messages": messages, "max_tokens": 500, "response_format": form, "store": True}
    made = client.post("/v1/chat/completions", json=ask).json()
    path = f"/v1/chat/completions/{made['id']}"
    assert client.get(path).json()["warnings"] == made["warnings"] != []
    assert client.delete(path).json()["deleted"]

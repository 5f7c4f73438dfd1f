"""A server of two API server processes: both have the routes of the plugin, in the formats of their APIs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings

from mvllm_compat.anthropic.protocol import CountTokensRequest, MessagesRequest
from mvllm_compat.ollama.protocol import OllamaChatRequest, OllamaGenerateRequest
from tests.helpers.random_bodies import random_requests
from tests.helpers.server import SMALL, ServerProcess

REQUESTS = random_requests(
    {
        "/v1/messages": MessagesRequest,
        "/v1/messages/count_tokens": CountTokensRequest,
        "/api/chat": OllamaChatRequest,
        "/api/generate": OllamaGenerateRequest,
    }
)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
EMPTY = {"type": "string", "maxLength": 0}
TWICE = {"type": "array", "items": EMPTY, "uniqueItems": True, "minItems": 2, "maxItems": 2}
ROOM = 500  # a call with the maximum amount of white space
_CHECKS: dict[str, Any] = {"suppress_health_check": list(HealthCheck), "deadline": None}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    arguments = ("demo", "--port", "0", "--served-model-name", "demo", "--api-server-count", "2", *SMALL)
    with ServerProcess(tmp_path_factory.mktemp("server"), *arguments) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx2.Client]:
    with server.client() as client:
        yield client


def test_every_api_server_has_the_routes_and_formats(server: ServerProcess) -> None:
    for _ in range(8):  # each connection is accepted by one of the processes
        with server.client() as client:
            assert client.get("/").text.startswith("Ollama is running\n")
            assert client.get("/api/tags").json()["models"][0]["name"] == "demo:latest"
            body = {"messages": QUESTION, "max_tokens": 32, "temperature": 0}
            answer = client.post("/v1/messages", json=body)
            assert "Paris" in answer.json()["content"][0]["text"]
            assert answer.headers["request-id"] == answer.headers["x-request-id"]
            card = client.get("/v1/models/demo", headers={"anthropic-version": "2023-06-01"}).json()
            assert card["type"] == "model" and "object" not in card


def test_the_description_of_the_api_has_routes_bodies_and_errors(client: httpx2.Client) -> None:
    document = client.get("/openapi.json").json()
    chat = document["paths"]["/api/chat"]["post"]
    assert chat["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/OllamaChatRequest")
    assert chat["tags"] == ["ollama"] and "ollama" in [tag["name"] for tag in document["tags"]]
    error = document["paths"]["/v1/messages"]["post"]["responses"]["default"]["content"]["application/json"]
    assert error["schema"]["$ref"] == "#/components/schemas/AnthropicError"
    assert {"AnthropicError", "OllamaError", "Error", "MessagesRequest"} <= set(document["components"]["schemas"])


def check(client: httpx2.Client, path: str, body: dict[str, Any]) -> None:
    answer = client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert answer.status_code in (200, 400, 404), (path, body, answer.text)
    if answer.status_code != 200 and path.startswith("/api/"):
        assert isinstance(answer.json()["error"], str)
    elif answer.status_code != 200:
        assert answer.json()["type"] == "error" and set(answer.json()["error"]) == {"message", "type"}
    elif path.startswith("/api/"):
        lines = [json.loads(line) for line in answer.text.splitlines()]
        assert lines[-1]["done"] is True and not any("error" in line for line in lines)
    elif body.get("stream") and path == "/v1/messages":
        assert "event: message_stop" in answer.text and "event: error" not in answer.text
    else:
        answer.json()


@settings(max_examples=60, **_CHECKS)
@given(request=REQUESTS)
def test_no_random_body_causes_a_500(client: httpx2.Client, request: tuple[str, dict[str, Any]]) -> None:
    check(client, *request)


@pytest.mark.exhaustive
@settings(max_examples=3000, **_CHECKS)
@given(request=REQUESTS)
def test_none_of_many_random_bodies_causes_a_500(client: httpx2.Client, request: tuple[str, dict[str, Any]]) -> None:
    check(client, *request)


@pytest.mark.parametrize("api", ["messages", "chat", "generate"])
def test_what_is_not_enforced_of_a_schema_is_named(client: httpx2.Client, api: str) -> None:
    options = {"options": {"num_predict": ROOM, "seed": 3}}
    parameters = {"type": "object", "properties": {"p": TWICE}, "required": ["p"]}
    tools = {"tools": [{"name": "f", "input_schema": parameters}], "tool_choice": {"type": "tool", "name": "f"}}
    path, ask = {
        "messages": ("/v1/messages", {"messages": QUESTION, "max_tokens": ROOM, **tools}),
        "chat": ("/api/chat", {"messages": QUESTION, "format": TWICE, **options}),
        "generate": ("/api/generate", {"prompt": "Hi", "format": TWICE, **options}),
    }[api]
    for stream in (False, True):
        answer = client.post(path, json={**ask, "stream": stream})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-mvllm-not-enforced"] == "uniqueItems"
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
        [warnings] = [each["warnings"] for each in map(json.loads, filter(_is_object, lines)) if "warnings" in each]
        assert re.fullmatch("The output does not satisfy uniqueItems at #.*", warnings[0])


def _is_object(line: str) -> bool:
    return line.startswith("{")

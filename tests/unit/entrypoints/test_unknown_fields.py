"""Unknown request fields: logged once, named in a header, or rejected."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from mvllm.entrypoints.openai.client_request import ClientRequest
from mvllm.entrypoints.openai.common.errors import APIError
from mvllm.entrypoints.openai.common.request_body import BodyDecoder
from mvllm.entrypoints.openai.common.serving_context import ServingContext
from mvllm.entrypoints.openai.common.serving_models import OpenAIServingModels
from mvllm.entrypoints.openai.common.tokenizer_pool import TokenizerPool
from mvllm.entrypoints.openai.common.unknown_fields import MAX_LOGGED_NAMES, MAX_NAMES, UnknownFields
from mvllm.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingRequest,
    RerankRequest,
)
from mvllm.entrypoints.openai.server.app import build_app
from mvllm.entrypoints.openai.server.http_metrics import HTTPMetrics
from mvllm.entrypoints.openai.server.server_state import ServerState
from mvllm.entrypoints.openai.server.settings import ServerSettings, UnknownFieldsPolicy

SECRET = "the secret prompt\r\nset-cookie: a=b"


class Tokenizer:
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [1]


def post(bodies: list[dict[str, Any]], policy: UnknownFieldsPolicy = "warn") -> list[httpx2.Response]:
    async def ask() -> list[httpx2.Response]:
        state = ServerState(60.0)
        engine = SimpleNamespace(
            tokenizer=Tokenizer(), model_config=SimpleNamespace(max_model_len=16, hf_config={}), errored=False
        )
        pool = TokenizerPool(cast(Any, Tokenizer()), 16)
        state.set_ready(ServingContext(cast(Any, engine), pool, cast(Any, None)))
        settings = ServerSettings(unknown_fields=policy)
        app = build_app(state, OpenAIServingModels(["m"], "m"), HTTPMetrics(CollectorRegistry()), settings)
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://x") as client:
            return [await client.post("/tokenize", json=body) for body in bodies]

    return asyncio.run(ask())


def found(kind: type[msgspec.Struct], body: dict[str, Any] | bytes) -> list[str]:
    """The unknown names that a request's response would have in its header."""
    scope: dict[str, Any] = {"mvllm.unknown_fields": []}
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    BodyDecoder(kind).decode(data, UnknownFields(), scope)
    return cast("list[str]", scope["mvllm.unknown_fields"])


def test_an_unknown_field_is_named_in_a_header_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": "x", "add_specialtokens": False}
    with caplog.at_level(logging.WARNING, logger="mvllm"):
        first, second, plain = post([body, body, {"prompt": "x"}])
    assert first.status_code == 200
    assert first.headers["x-mvllm-unknown-fields"] == second.headers["x-mvllm-unknown-fields"] == "add_specialtokens"
    assert "x-mvllm-unknown-fields" not in plain.headers
    [line] = [record.getMessage() for record in caplog.records]
    assert "/tokenize" in line and "Did you mean add_special_tokens?" in line


def test_a_server_can_reject_unknown_fields_or_ignore_them(caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": "x", "add_specialtokens": False}
    [refused] = post([body], "refuse")
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"] == "add_specialtokens" and error["code"] == "unknown_field"
    assert "Did you mean add_special_tokens?" in error["message"]
    [ignored] = post([body], "ignore")
    assert ignored.status_code == 200 and "x-mvllm-unknown-fields" not in ignored.headers
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_unprintable_names_are_neither_logged_nor_in_the_header(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="mvllm"):
        [answer] = post([{"prompt": "x", SECRET: 1, "a\nb": 2, "ok": 3}])
        [refused] = post([{"prompt": "x", SECRET: 1}], "refuse")
    assert answer.headers["x-mvllm-unknown-fields"] == "?, ok"
    assert "secret" not in caplog.text and "secret" not in refused.text and refused.json()["error"]["param"] is None
    many = {f"f{i}_{'x' * 50}": i for i in range(1000)}
    [answer] = post([{"prompt": "x", **many}])
    assert len(answer.headers["x-mvllm-unknown-fields"]) < 600


def test_query_parameters_of_administration_are_checked_too() -> None:
    """They are in the query: `/sleep?levl=2` would otherwise sleep at the wrong level."""

    async def sleep(policy: UnknownFieldsPolicy) -> tuple[httpx2.Response, list[int]]:
        levels: list[int] = []

        class Engine(SimpleNamespace):
            errored = False
            is_asleep = True

            async def sleep(self, level: int) -> None:
                levels.append(level)

        state = ServerState(60.0)
        state.set_ready(ServingContext(cast(Any, Engine()), cast(Any, None), cast(Any, None)))
        settings = ServerSettings(unknown_fields=policy, admin_api_keys=("k",))
        app = build_app(state, OpenAIServingModels(["m"], "m"), HTTPMetrics(CollectorRegistry()), settings)
        headers = {"Authorization": "Bearer k"}
        async with httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app), base_url="http://x", headers=headers
        ) as client:
            return await client.post("/sleep?levl=2"), levels

    answer, levels = asyncio.run(sleep("warn"))
    assert (answer.status_code, answer.headers["x-mvllm-unknown-fields"], levels) == (200, "levl", [1])
    answer, levels = asyncio.run(sleep("refuse"))
    assert answer.status_code == 400 and "Did you mean level?" in answer.json()["error"]["message"] and levels == []


def test_the_number_of_stored_names_is_limited(caplog: pytest.LogCaptureFixture) -> None:
    decoder, unknown = BodyDecoder(CompletionRequest), UnknownFields()
    with caplog.at_level(logging.WARNING, logger="mvllm"):
        for i in range(MAX_LOGGED_NAMES + 50):
            decoder.decode(json.dumps({"prompt": "x", f"name_{i}": 1}).encode(), unknown)
    assert len(caplog.records) == MAX_LOGGED_NAMES + 1 and "no more will be" in caplog.text


@pytest.mark.parametrize("body", [b'{"prompt":"x","\xff":1}', b'{"prompt":"x","stream_options":{"\xff":1}}'])
def test_an_unknown_name_that_is_not_utf_8_is_the_clients_error(body: bytes) -> None:
    with pytest.raises(APIError, match="not valid UTF-8: byte 255"):
        found(CompletionRequest, body)


def test_a_body_of_very_many_unknown_fields_is_reported_by_the_first() -> None:
    body = b'{"prompt":"x",' + b",".join(b'"a%d":1' % i for i in range(100_000)) + b"}"
    assert found(CompletionRequest, body) == ["a0"]
    assert len(found(CompletionRequest, {f"b{i}": 1 for i in range(100)})) == MAX_NAMES


@pytest.mark.parametrize(
    ("kind", "body", "names"),
    [
        (ChatCompletionRequest, {"stream_options": {"include_usge": True}}, ["stream_options.include_usge"]),
        (ChatCompletionRequest, {"topk": 1, "stream_options": {"x": 1}}, ["topk", "stream_options.x"]),
        (
            ChatCompletionRequest,
            {"response_format": {"type": "json_schema", "schema": {}, "json_schema": {"shema": {"any": {}}}}},
            ["response_format.schema", "response_format.json_schema.shema"],
        ),
        (RerankRequest, {"documents": [{"text": "a", "title": "b"}], "max_chunks": 5}, ["max_chunks"]),
        # Objects that OpenAI leaves open.
        (
            ChatCompletionRequest,
            {
                "messages": [{"role": "user", "content": "x", "mine": 1}],
                "tools": [{"type": "function", "function": {"name": "f", "mine": 1}, "mine": 1}],
                "chat_template_kwargs": {"mine": 1},
                "response_format": {"type": "structural_tag", "mine": 1},
                "metadata": {"mine": 1},
            },
            [],
        ),
    ],
)
def test_objects_with_a_fixed_set_of_fields_are_checked(
    kind: type[msgspec.Struct], body: dict[str, Any], names: list[str]
) -> None:
    assert found(kind, body) == names


@pytest.mark.parametrize("kind", [ChatCompletionRequest, CompletionRequest, EmbeddingRequest])
def test_fields_that_clients_always_send_are_known(kind: type[msgspec.Struct]) -> None:
    body = dict.fromkeys(ClientRequest.__struct_fields__)
    assert {"user", "metadata", "store", "service_tier"} <= set(body) and found(kind, body) == []
    page = (Path(__file__).parents[3] / "docs" / "reference" / "http-api.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in set(body) - {"model"})


def test_the_settings_of_plugins_structs_apply() -> None:
    """Renamed fields and tags have the names that clients send; arrays have no names."""

    class Renamed(msgspec.Struct, rename="camel", tag="r", tag_field="kind"):
        some_field: int = 0

    class Row(msgspec.Struct, array_like=True):
        a: int

    class Strict(msgspec.Struct, forbid_unknown_fields=True):
        a: int = 0

    assert found(Renamed, {"kind": "r", "someField": 1, "some_field": 2}) == ["some_field"]
    assert found(Row, b"[1,2]") == []
    with pytest.raises(APIError):
        found(Strict, {"b": 1})

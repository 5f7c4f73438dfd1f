"""Decoding of request bodies."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest
from starlette.requests import Request
from starlette.types import Message

from mvllm.entrypoints.openai.common.errors import APIError
from mvllm.entrypoints.openai.common.request_body import (
    MAX_CONTAINERS,
    MAX_STRINGS,
    MAX_VALUES,
    SMALL_BODY_BYTES,
    BodyDecoder,
    BodyReader,
    read_query,
)
from mvllm.entrypoints.openai.common.unknown_fields import UNKNOWN_FIELDS_SCOPE_KEY, UnknownFields
from mvllm.entrypoints.openai.protocol import CompletionRequest


def test_a_body_of_too_many_lists_is_not_decoded() -> None:
    decoder = BodyDecoder(CompletionRequest)
    assert len(decoder.decode(b'{"prompt":[' + b"[]," * 1000 + b"[]]}").prompt or "") == 1001
    with pytest.raises(APIError, match="lists, objects") as raised:
        decoder.decode(b'{"prompt":[' + b"[]," * MAX_CONTAINERS + b"[]]}")
    assert raised.value.status == 400
    with pytest.raises(APIError, match="fields"):
        decoder.decode(b"{" + b",".join(b'"%d" : 1' % number for number in range(MAX_CONTAINERS + 1)) + b"}")


def test_brackets_and_colons_in_strings_are_not_limited() -> None:
    text = '[{"\\\\": 1}]' * MAX_CONTAINERS
    body = json.dumps({"prompt": [text, "a", "[{:\\"]}).encode()
    assert BodyDecoder(CompletionRequest).decode(body).prompt == [text, "a", "[{:\\"]


def test_a_body_of_too_many_values_is_not_decoded() -> None:
    decoder = BodyDecoder(CompletionRequest)
    assert len(decoder.decode(b'{"prompt":[' + b"5," * 1000 + b"5]}").prompt or "") == 1001
    with pytest.raises(APIError, match="values") as raised:
        decoder.decode(b'{"prompt":[' + b"5," * (MAX_VALUES + 1) + b"5]}")
    assert raised.value.status == 400


def test_a_body_of_too_many_strings_is_not_decoded() -> None:
    decoder = BodyDecoder(CompletionRequest)
    with pytest.raises(APIError, match="strings"):
        decoder.decode(b'{"prompt":[' + b'"a",' * MAX_STRINGS + b'"a"]}')
    quoted = json.dumps({"prompt": '"' * 3 * MAX_STRINGS}).encode()
    assert len(str(decoder.decode(quoted).prompt)) == 3 * MAX_STRINGS


def test_a_body_that_arrives_in_small_parts_times_out() -> None:
    """Each part arrives in time, the whole body does not."""

    async def send_slowly() -> Message:
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b" ", "more_body": True}

    async def read() -> bytes:
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
        return await BodyReader(1 << 20, 0.05).read(Request(scope, send_slowly))

    with pytest.raises(APIError) as raised:
        asyncio.run(asyncio.wait_for(read(), 120))
    assert raised.value.status == 408 and raised.value.close


SHORT_PATHS = (
    *("/api/show", "/models/unload", "/v1/load_lora_adapter"),
    *("/v1/conversations/conv_1", "/v1/chat/completions/chatcmpl-1"),
)


@pytest.mark.parametrize("path", SHORT_PATHS)
def test_a_route_whose_bodies_are_short_reads_no_long_one(path: str) -> None:
    read = 0

    async def send() -> Message:
        nonlocal read
        read += 1 << 14
        return {"type": "http.request", "body": b" " * (1 << 14), "more_body": read < 1 << 18}

    async def run(headers: list[tuple[bytes, bytes]], path: str) -> bytes:
        headers = [(b"content-type", b"application/json"), *headers]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
        return await BodyReader(1 << 20, 5).read(Request(scope, send))

    with pytest.raises(APIError, match="longer than the 65536 bytes") as raised:
        asyncio.run(run([(b"content-length", b"65537")], path))
    assert raised.value.status == 413 and read == 0
    with pytest.raises(APIError, match="longer than the 65536 bytes"):
        asyncio.run(run([], path))
    assert read <= SMALL_BODY_BYTES + (1 << 14)
    read = 0
    assert len(asyncio.run(run([], f"{path}/items"))) == 1 << 18


class Page(msgspec.Struct):
    limit: int
    names: list[str] | None = None
    after: str | None = None
    whole: bool = False


def query_of(text: str) -> Request:
    return Request({"type": "http", "query_string": text.encode(), "headers": [], UNKNOWN_FIELDS_SCOPE_KEY: []})


def test_query_parameters_are_read_into_a_struct() -> None:
    assert read_query(query_of("limit=3"), Page) == Page(3)
    found = read_query(query_of("limit=1&limit=-2&names=a&names=b&after=null&whole=true"), Page)
    assert found == Page(-2, ["a", "b"], "null", whole=True)


@pytest.mark.parametrize(
    ("query", "name"), [("limit=x", "limit"), ("", "limit"), ("limit=1.5", "limit"), ("limit=1&whole=x", "whole")]
)
def test_a_query_parameter_that_is_not_valid_is_named(query: str, name: str) -> None:
    with pytest.raises(APIError, match=f"'{name}' is not valid") as raised:
        read_query(query_of(query), Page)
    assert (raised.value.status, raised.value.param) == (400, name)


def test_unknown_query_parameters_are_reported() -> None:
    reader = BodyReader(100, 5.0, UnknownFields("refuse"))
    assert reader.read_query(query_of("limit=1"), Page).limit == 1
    with pytest.raises(APIError, match=r"limti is not known\. Did you mean limit"):
        reader.read_query(query_of("limit=1&limti=2"), Page)

"""`/v1/embeddings` with the real OpenAI SDK, compared with `LLM.embed`; and its errors."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from openai import OpenAI

from mvllm import LLM, PoolingParams
from tests.helpers.server import ServerProcess, wait_idle

TEXTS = ["Once upon a time", "The capital of France is Paris.", "x"]


@pytest.fixture(scope="module")
def sdk(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", kv_cache_memory_bytes=64 << 20) as llm:
        yield llm


def assert_close(found: list[list[float]], expected: list[list[float]]) -> None:
    """The tolerance covers bfloat16, whose last digits depend on the batch; tests/engine uses float32."""
    for one, other in zip(np.array(found), np.array(expected), strict=True):
        assert one @ other > 0.999 * np.linalg.norm(one) * np.linalg.norm(other)
        assert abs(np.linalg.norm(one) / np.linalg.norm(other) - 1) < 0.05


def test_texts_and_token_ids_have_the_embeddings_of_llm(sdk: OpenAI, llm: LLM) -> None:
    expected = [output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)]
    ids = [llm.llm_engine.tokenizer.encode(text) for text in TEXTS]
    for given in (TEXTS, ids):
        answer = sdk.embeddings.create(model="demo", input=given)  # type: ignore[arg-type]
        assert [each.index for each in answer.data] == [0, 1, 2] and answer.model == "demo" and answer.object == "list"
        assert_close([each.embedding for each in answer.data], expected)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    for one in (TEXTS[1], ids[1]):
        [single] = sdk.embeddings.create(model="little", input=one, user="me").data
        assert_close([single.embedding], [expected[1]])
    assert abs(np.linalg.norm(expected[0]) - 1) < 1e-5


def test_base64_and_numbers_are_the_same_embedding(sdk: OpenAI, client: httpx2.Client) -> None:
    asked = {"model": "demo", "input": TEXTS[0]}
    as_numbers = client.post("/v1/embeddings", json=asked).json()["data"][0]["embedding"]
    as_bytes = client.post("/v1/embeddings", json=asked | {"encoding_format": "base64"}).json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(as_bytes), "<f4").tolist() == as_numbers
    [by_sdk] = sdk.embeddings.create(**asked, encoding_format="float").data
    assert by_sdk.embedding == as_numbers


def test_dimensions_and_normalize(sdk: OpenAI, llm: LLM) -> None:
    for settings in ({"dimensions": 12}, {"dimensions": 5, "normalize": False}):
        [expected] = llm.embed(TEXTS[1], PoolingParams(**settings), use_tqdm=False)  # type: ignore[arg-type]
        [found] = sdk.embeddings.create(model="demo", input=TEXTS[1], extra_body=settings).data
        assert_close([found.embedding], [expected.outputs.embedding])


def test_many_concurrent_inputs_next_to_completions(sdk: OpenAI, llm: LLM) -> None:
    texts = [f"{TEXTS[i % 3]} {i}" for i in range(40)]
    expected = [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]

    def chat(i: int) -> str | None:
        return sdk.completions.create(model="demo", prompt=texts[i], max_tokens=20, temperature=0).choices[0].text

    with ThreadPoolExecutor(12) as pool:
        written = [pool.submit(chat, i) for i in range(6)]
        one_by_one = pool.map(lambda text: sdk.embeddings.create(model="demo", input=text), texts[:20])
        vectors = [answer.data[0].embedding for answer in one_by_one]
        vectors += [each.embedding for each in sdk.embeddings.create(model="demo", input=texts[20:]).data]
        assert all(each.result() for each in written)
    assert_close(vectors, expected)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": "", "add_special_tokens": False}, "input"),
        ({"input": ["x", ""], "add_special_tokens": False}, "input"),
        ({"input": ["x", 3]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [[3], []]}, "input"),
        ({"input": {"text": "x"}}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "dimensions": 1 << 20}, "dimensions"),
        ({"input": "x", "dimensions": "8"}, "dimensions"),
        ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "x", "priority": 2**40}, "priority"),
    ],
    ids=str,
)
def test_invalid_fields_are_rejected_by_name(client: httpx2.Client, body: dict[str, Any], param: str) -> None:
    answer = client.post("/v1/embeddings", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and error["type"] == "BadRequestError" and error["message"]


def test_an_input_beyond_max_model_len_is_an_error(sdk: OpenAI) -> None:
    limit = sdk.models.retrieve("demo").max_model_len  # type: ignore[attr-defined]
    assert sdk.embeddings.create(model="demo", input=[[5] * limit]).usage.prompt_tokens == limit
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.embeddings.create(model="demo", input=[[5], [5] * (limit + 1)])
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "input"
    assert "Prompt 1 of 2" in str(caught.value)
    with pytest.raises(openai.NotFoundError):
        sdk.embeddings.create(model="nobody", input="x")


def test_a_disconnect_aborts_the_request(server: ServerProcess, client: httpx2.Client) -> None:
    limit = client.get("/v1/models").json()["data"][0]["max_model_len"]
    with server.client(timeout=0.05) as hasty, pytest.raises(httpx2.TimeoutException):
        hasty.post("/v1/embeddings", json={"input": [[7 + i] * limit for i in range(60)]})
    wait_idle(client)
    assert client.post("/v1/embeddings", json={"input": "x"}).status_code == 200

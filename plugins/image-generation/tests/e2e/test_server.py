"""A server with the package: guidance of texts, and requests for images to a model of text."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import httpx2
import pytest

from tests.e2e.server.test_sampling_fields import CHAT, PATH, STORY, choices
from tests.helpers.server import SMALL, ServerProcess


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    folder = tmp_path_factory.mktemp("server")
    with ServerProcess(folder, "demo", "--port", "0", *SMALL) as server, server.wait_ready().client() as client:
        yield client


def test_a_guided_choice_has_its_log_probabilities_without_guidance(client: httpx2.Client) -> None:
    guided = {"guidance_scale": 2, "negative_prompt": "The dog", "temperature": 1, "seed": 3, "return_token_ids": True}
    [found] = choices(client, **guided, logprobs=0)
    assert len(found["conditional_logprobs"]) == len(found["token_ids"]) == 8
    whole = [*found["prompt_token_ids"], *found["token_ids"]]
    [scored] = choices(client, prompt=whole, echo=True, logprobs=0, max_tokens=0)
    alone = scored["logprobs"]["token_logprobs"][-8:]
    assert found["conditional_logprobs"] == pytest.approx(alone, abs=0.2)  # in bfloat16
    assert max(abs(a - b) for a, b in zip(found["logprobs"]["token_logprobs"], alone, strict=True)) > 0.5
    assert "conditional_logprobs" not in choices(client, **guided)[0]
    assert "conditional_logprobs" not in choices(client, logprobs=0)[0]

    chat = "/v1/chat/completions"
    [message] = choices(client, chat, **guided, logprobs=True)
    assert len(message["conditional_logprobs"]) == len(message["token_ids"]) == len(message["logprobs"]["content"])
    for path, body, expected in (
        (PATH, {**STORY, **guided, "logprobs": 0}, found),
        (chat, {**CHAT, **guided, "logprobs": True}, message),
    ):
        lines = client.post(path, json={**body, "stream": True}).text.splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        parts = [choice.get("conditional_logprobs", []) for chunk in chunks for choice in chunk["choices"]]
        assert [*itertools.chain(*parts)] == pytest.approx(expected["conditional_logprobs"], abs=1e-4)


def test_a_model_of_text_generates_no_images(client: httpx2.Client) -> None:
    answer = client.post("/v1/images/generations", json={"prompt": "a house"})
    assert answer.status_code == 400 and "generates text, not images" in answer.json()["error"]["message"]
    schema = client.get("/openapi.json").json()["paths"]["/v1/images/generations"]["post"]
    assert schema["tags"] == ["generation"]

"""Pooling over HTTP with images: conversations, contents of scores, and errors; compared with `LLM`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from mvllm import LLM
from mvllm.messages.inputs import TextPrompt
from tests.e2e.server.test_images import image_part, picture, text_part
from tests.helpers.multimodal_zoo import make_checkpoint
from tests.helpers.processes import assert_nothing_left, shared_memory_names
from tests.helpers.server import SMALL, ServerProcess
from tests.helpers.zoo_retrieval import IMAGE_PROMPT, PADDING, retrieval_oracle

pytestmark = pytest.mark.exhaustive

CLOSE = {"atol": 1e-5, "rtol": 0}
MESSAGES = [{"role": "user", "content": [text_part("what"), image_part(picture())]}]
QUERY = f"Query: which?{PADDING * 10}\n"


def serve(folder: Path, model: Path) -> Iterator[httpx2.Client]:
    before = shared_memory_names()
    settings = ("--dtype", "float32", "--max-model-len", "512", "--platform", "cpu", *SMALL)
    with ServerProcess(folder, str(model), "--port", "0", "--served-model-name", "it", *settings) as server:
        with server.wait_ready().client() as client:
            yield client
    assert server.wait() == 0, server.log[-3000:]
    assert_nothing_left(server.tag, before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llava", tmp_path_factory.mktemp("model") / "llava")


@pytest.fixture(scope="module")
def one_vector(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    yield from serve(tmp_path_factory.mktemp("one"), model)


@pytest.fixture(scope="module")
def of_tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    yield from serve(tmp_path_factory.mktemp("tokens"), retrieval_oracle("colqwen2").folder)


def ask(client: httpx2.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json={"model": "it", **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def error(client: httpx2.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json={"model": "it", **body})
    assert answer.status_code == 400, answer.text
    found: dict[str, Any] = answer.json()["error"]
    return found


def test_a_conversation_with_an_image_is_one_prompt(one_vector: httpx2.Client, model: Path) -> None:
    rendered = "[user] what\n<image>\n"
    prompts = [
        TextPrompt(prompt=rendered + end, multi_modal_data={"image": picture()}, add_special_tokens=special)
        for end, special in (("", False), ("[assistant] ", True))
    ]
    with LLM(str(model), dtype="float32", max_model_len=512, platform="cpu", kv_cache_memory_bytes=32 << 20) as llm:
        plain, generating = llm.embed(prompts, use_tqdm=False)
    answer = ask(one_vector, "/v1/embeddings", messages=MESSAGES)
    np.testing.assert_allclose(answer["data"][0]["embedding"], plain.outputs.embedding, **CLOSE)
    assert answer["usage"]["prompt_tokens"] == len(plain.prompt_token_ids) > 9  # the rows of the image
    settings = {"add_generation_prompt": True, "add_special_tokens": True}
    answer = ask(one_vector, "/pooling", messages=MESSAGES, **settings)
    np.testing.assert_allclose(answer["data"][0]["data"], generating.outputs.embedding, **CLOSE)
    both = error(one_vector, "/v1/embeddings", messages=MESSAGES, input="a")
    assert both["param"] == "messages" and both["message"] == "Send either input or messages."
    broken = [{"role": "user", "content": [image_part(b"no picture")]}]
    assert error(one_vector, "/v1/embeddings", messages=broken)["param"] == "messages"
    cut = error(one_vector, "/v1/embeddings", messages=MESSAGES, truncate_prompt_tokens=4)
    assert "truncate_prompt_tokens cannot be combined with images" in cut["message"]


def test_documents_with_images_are_scored_and_sorted(one_vector: httpx2.Client) -> None:
    documents = [{"content": [image_part(picture(color))]} for color in ("red", "blue")]
    answer = ask(one_vector, "/score", text_1="red", text_2=[*documents, "red"])
    scores = [each["score"] for each in answer["data"]]
    assert scores[2] == pytest.approx(1.0) and len(set(scores)) == 3
    ranked = ask(one_vector, "/rerank", query="red", documents=documents)["results"]
    assert [each["relevance_score"] for each in ranked] == pytest.approx(sorted(scores[:2], reverse=True))
    assert ranked[0]["document"]["multi_modal"] == documents[ranked[0]["index"]]["content"]
    unknown = error(one_vector, "/score", text_1="a", text_2={"content": [{"type": "file"}]})
    assert unknown["param"] == "text_2" and "found 'file'" in unknown["message"]


def test_a_model_with_a_vector_for_each_token(of_tokens: httpx2.Client) -> None:
    document = {"content": [image_part(picture()), text_part(IMAGE_PROMPT)]}
    answer = ask(of_tokens, "/score", queries=QUERY, documents=document)
    vectors = np.array(ask(of_tokens, "/pooling", input=QUERY)["data"][0]["data"])
    tokens = ask(of_tokens, "/pooling", input=QUERY, task="token_embed")
    np.testing.assert_allclose(vectors, tokens["data"][0]["data"], **CLOSE)
    assert vectors.shape == (tokens["usage"]["prompt_tokens"], 24)
    with_itself = ask(of_tokens, "/score", queries=QUERY, documents=QUERY)["data"][0]["score"]
    assert with_itself == pytest.approx((vectors @ vectors.T).max(1).sum(), abs=1e-3)
    assert with_itself > answer["data"][0]["score"]
    refused = error(of_tokens, "/v1/embeddings", input=QUERY)
    assert "a vector for each token, and none for a whole prompt" in refused["message"]

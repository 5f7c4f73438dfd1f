"""Embeddings, classification, scores and reranking over HTTP, compared with `LLM` for the same texts; and errors."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import numpy as np
import pytest

from mvllm import LLM
from tests.helpers import encoder_zoo as zoo
from tests.helpers.processes import assert_nothing_left, shared_memory_names
from tests.helpers.server import ServerProcess

QUERY = "Which one is it?"
DOCUMENTS = ["it is this one", "no", "x y z", "which one, then", "a b c " * 10]
CLOSE = {"atol": 1e-5, "rtol": 0}


def serve(tmp_path_factory: pytest.TempPathFactory, architecture: str) -> Iterator[httpx2.Client]:
    before = shared_memory_names()
    model = zoo.checkpoint(architecture, labels=1, tokenizer=True)
    folder = tmp_path_factory.mktemp("pooled")
    with ServerProcess(folder, str(model), "--port", "0", "--served-model-name", "it") as server:
        with server.wait_ready().client() as client:
            yield client
    assert server.wait() == 0, server.log[-3000:]
    assert_nothing_left(server.tag, before)


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    """A cross-encoder, which is a classifier with one label."""
    yield from serve(tmp_path_factory, "BertForSequenceClassification")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    yield from serve(tmp_path_factory, "BertModel")


@pytest.fixture(scope="module")
def judge_scores() -> np.ndarray:
    """Scores of the documents for the query."""
    with LLM(str(zoo.checkpoint("BertForSequenceClassification", labels=1, tokenizer=True))) as llm:
        return np.array([output.outputs.score for output in llm.score(QUERY, DOCUMENTS, use_tqdm=False)])


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    """Embeddings of the query and the documents."""
    with LLM(str(zoo.checkpoint("BertModel", labels=1, tokenizer=True))) as llm:
        return np.array([output.outputs.embedding for output in llm.embed([QUERY, *DOCUMENTS], use_tqdm=False)])


@pytest.mark.parametrize(("name", "capabilities"), [("judge", []), ("encoder", ["embedding"])])
def test_models_for_embeddings_say_so(name: str, capabilities: list[str], request: pytest.FixtureRequest) -> None:
    [card] = request.getfixturevalue(name).get("/v1/models").json()["data"]
    assert card["capabilities"] == capabilities


def ask(client: httpx2.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json={"model": "it", **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def scores_of(answer: dict[str, Any]) -> list[float]:
    assert answer["object"] == "list" and answer["usage"]["prompt_tokens"] > 0
    assert [each["index"] for each in answer["data"]] == list(range(len(answer["data"])))
    return [each["score"] for each in answer["data"]]


def test_a_cross_encoder_scores_pairs(judge: httpx2.Client, judge_scores: np.ndarray) -> None:
    for path in ("/score", "/v1/score"):
        np.testing.assert_allclose(scores_of(ask(judge, path, text_1=QUERY, text_2=DOCUMENTS)), judge_scores, **CLOSE)
    pairs = ask(judge, "/score", queries=[QUERY] * 2, documents=DOCUMENTS[:2])
    np.testing.assert_allclose(scores_of(pairs), judge_scores[:2], **CLOSE)
    plain = scores_of(ask(judge, "/score", text_1=QUERY, text_2=DOCUMENTS, use_activation=False))
    np.testing.assert_allclose(1 / (1 + np.exp(-np.array(plain))), judge_scores, **CLOSE)
    with ThreadPoolExecutor(8) as pool:
        one_by_one = pool.map(lambda text: scores_of(ask(judge, "/score", text_1=QUERY, text_2=text))[0], DOCUMENTS * 4)
        np.testing.assert_allclose(list(one_by_one), np.tile(judge_scores, 4), **CLOSE)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_sorted_by_relevance(judge: httpx2.Client, judge_scores: np.ndarray, path: str) -> None:
    order = np.argsort(-judge_scores).tolist()
    results = ask(judge, path, query=QUERY, documents=DOCUMENTS)["results"]
    assert [each["index"] for each in results] == order
    assert [each["document"]["text"] for each in results] == [DOCUMENTS[i] for i in order]
    np.testing.assert_allclose([each["relevance_score"] for each in results], judge_scores[order], **CLOSE)
    given = [{"text": text} for text in DOCUMENTS]
    best = ask(judge, path, query=QUERY, documents=given, top_n=2, return_documents=False)["results"]
    assert [each["index"] for each in best] == order[:2] and "document" not in best[0]


def test_a_classifier_names_the_label(judge: httpx2.Client) -> None:
    texts = [QUERY, DOCUMENTS[0]]
    answer = ask(judge, "/classify", input=texts)
    assert [(each["index"], each["label"], each["num_classes"]) for each in answer["data"]] == [
        (0, "LABEL_0", 1),
        (1, "LABEL_0", 1),
    ]
    pooled = ask(judge, "/pooling", input=texts, task="classify")
    assert [each["data"] for each in pooled["data"]] == [each["probs"] for each in answer["data"]]


def test_an_encoder_returns_embeddings_and_scores(encoder: httpx2.Client, vectors: np.ndarray) -> None:
    texts = [QUERY, *DOCUMENTS]
    answer = ask(encoder, "/v1/embeddings", input=texts)
    np.testing.assert_allclose([each["embedding"] for each in answer["data"]], vectors, **CLOSE)
    pooled = ask(encoder, "/pooling", input=texts, encoding_format="base64")
    found = [np.frombuffer(base64.b64decode(each["data"]), "<f4") for each in pooled["data"]]
    np.testing.assert_allclose(found, vectors, **CLOSE)
    each_token = ask(encoder, "/pooling", input=QUERY, task="token_embed")["data"][0]["data"]
    assert len(each_token) == ask(encoder, "/v1/embeddings", input=QUERY)["usage"]["prompt_tokens"]
    np.testing.assert_allclose(each_token[0], vectors[0], **CLOSE)  # the score of the prompt is at its first token
    np.testing.assert_allclose(
        scores_of(ask(encoder, "/score", text_1=QUERY, text_2=DOCUMENTS)), vectors[1:] @ vectors[0], **CLOSE
    )
    order = np.argsort(-(vectors[1:] @ vectors[0])).tolist()
    assert [each["index"] for each in ask(encoder, "/rerank", query=QUERY, documents=DOCUMENTS)["results"]] == order


def test_truncate_prompt_tokens(encoder: httpx2.Client) -> None:
    long = "a " * 300
    refused = encoder.post("/v1/embeddings", json={"input": long})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    whole = ask(encoder, "/v1/embeddings", input="a " * 128)
    cut = ask(encoder, "/v1/embeddings", input=long, truncate_prompt_tokens=-1)
    assert cut["data"] == whole["data"] and cut["usage"]["prompt_tokens"] == 130
    assert ask(encoder, "/v1/embeddings", input=[long, "a"], truncate_prompt_tokens=9)["usage"]["prompt_tokens"] == 12


def test_fields_of_other_engines_that_change_vectors(encoder: httpx2.Client, vectors: np.ndarray) -> None:
    def embed(path: str = "/v1/embeddings", **fields: Any) -> np.ndarray:
        [entry] = ask(encoder, path, input=QUERY, **fields)["data"]
        given = entry["embedding" if path == "/v1/embeddings" else "data"]
        if isinstance(given, str):
            order, width = ">" if fields["endianness"] == "big" else "<", 2 if fields["embed_dtype"] == "float16" else 4
            return np.frombuffer(base64.b64decode(given), f"{order}f{width}")
        return np.array(given)

    unscaled = embed(normalize=False)
    assert abs(np.linalg.norm(unscaled) - 1) > 0.1
    for path in ("/v1/embeddings", "/pooling"):
        np.testing.assert_allclose(embed(path, use_activation=False), unscaled, **CLOSE)
        np.testing.assert_allclose(embed(path, use_activation=True), vectors[0], **CLOSE)
        for dtype, endianness in (("float16", "big"), ("float32", "big"), ("float16", "native")):
            found = embed(path, encoding_format="base64", embed_dtype=dtype, endianness=endianness)
            np.testing.assert_allclose(found, vectors[0], atol=1e-3)


def test_documents_may_be_cut_for_ranking(judge: httpx2.Client, encoder: httpx2.Client) -> None:
    long = "it is this one and much more of it " * 3
    for client in (judge, encoder):
        for num_tokens in (3, 1000):
            counted = client.post("/tokenize", json={"prompt": long, "add_special_tokens": False}).json()
            ids = counted["tokens"][:num_tokens]
            short = client.post("/detokenize", json={"tokens": ids}).json()["prompt"]
            [cut] = ask(client, "/rerank", query=QUERY, documents=[long], max_tokens_per_doc=num_tokens)["results"]
            [by_hand] = ask(client, "/rerank", query=QUERY, documents=[short], cache_salt="mine")["results"]
            assert cut["document"] == {"text": long}
            assert abs(cut["relevance_score"] - by_hand["relevance_score"]) < 1e-5


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/embeddings", {"input": "x"}, "task"),
    ("/pooling", {"input": "x", "task": "embed"}, "task"),
    ("/pooling", {"input": "x", "task": "dance"}, "task"),
    ("/pooling", {"input": "x", "pooling_type": "most"}, "pooling_type"),
    ("/pooling", {"input": "x", "pooling_type": "mean"}, "pooling_type"),
    ("/pooling", {}, "input"),
    ("/classify", {}, "input"),
    ("/classify", {"input": [-1]}, "input"),
    ("/classify", {"input": ["x"] * 2049}, "input"),
    ("/classify", {"input": "x", "use_activation": "yes"}, "use_activation"),
    ("/classify", {"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ("/classify", {"input": "x", "truncate_prompt_tokens": 2**70}, "truncate_prompt_tokens"),
    ("/classify", {"input": "x", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
    ("/classify", {"input": "x", "priority": 2**40}, "priority"),
    ("/score", {}, "text_1"),
    ("/score", {"text_1": "x"}, "text_2"),
    ("/score", {"text_1": "x", "queries": "x", "text_2": "y"}, "text_1"),
    ("/score", {"text_1": [], "text_2": "x"}, "text_1"),
    ("/score", {"text_1": ["x", "y"], "text_2": ["z"]}, "text_1"),
    ("/score", {"text_1": "x", "text_2": ["z"] * 2049}, "text_2"),
    ("/score", {"text_1": "x", "text_2": [["z"]]}, "text_2"),
    ("/score", {"text_1": "x", "text_2": "y " * 200}, "text_2"),
    ("/score", {"text_1": "x", "text_2": "y", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
    ("/rerank", {"documents": ["x"]}, "query"),
    ("/rerank", {"query": "x"}, "documents"),
    ("/rerank", {"query": "x", "documents": []}, "documents"),
    ("/rerank", {"query": "x", "documents": [5]}, "documents"),
    ("/rerank", {"query": "x", "documents": [{"image": "y"}]}, "documents"),
    ("/rerank", {"query": "x", "documents": ["y"], "top_n": -1}, "top_n"),
    ("/rerank", {"query": ["x"], "documents": ["y"]}, "query"),
    ("/rerank", {"query": "x", "documents": ["y"], "max_tokens_per_doc": 0}, "max_tokens_per_doc"),
    ("/rerank", {"query": "x", "documents": ["y"], "rank_fields": ["text"]}, "rank_fields"),
    (
        "/score",
        {"text_1": "x", "text_2": "y", "truncate_prompt_tokens": 9, "truncation_side": "left"},
        "truncation_side",
    ),
    ("/score", {"text_1": "x", "text_2": "y", "cache_salt": ""}, "cache_salt"),
    ("/v1/completions", {"prompt": "x"}, "model"),
]


@pytest.mark.parametrize(("path", "body", "param"), REFUSED, ids=str)
def test_invalid_fields_are_rejected_by_name(judge: httpx2.Client, path: str, body: dict[str, Any], param: str) -> None:
    answer = judge.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and error["type"] == "BadRequestError" and error["message"]


def test_invalid_bodies_are_rejected_and_the_server_continues(judge: httpx2.Client) -> None:
    json = {"content-type": "application/json"}
    for path in ("/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"):
        for body in (b"", b"{", b"[]", b"null", b'{"model": 3}', b"\xff", b"[" * 100_000):
            assert judge.post(path, content=body, headers=json).status_code == 400
        assert judge.post(path, content=b"input=x").status_code == 415
        assert judge.post(path, json={"model": "nobody", "input": "x"}).status_code == 404
        assert judge.get(path).status_code == 405
    lone = b'{"text_1": "x", "text_2": "\\ud800"}'
    assert judge.post("/score", content=lone, headers=json).status_code == 400
    assert scores_of(ask(judge, "/score", text_1="x", text_2="y"))

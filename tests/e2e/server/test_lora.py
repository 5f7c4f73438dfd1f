"""A server with LoRA adapters: each is a model with its own name, and administrators load and unload them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from transformers import PreTrainedModel

from tests.helpers.changed_weights import changed_copy
from tests.helpers.lora_adapters import merged, write_adapter
from tests.helpers.model_zoo import make_checkpoint
from tests.helpers.processes import assert_nothing_left, shared_memory_names
from tests.helpers.server import ServerProcess

ADMIN = "an-admin-key"
PROMPT = [5, 6, 7, 8, 9, 40, 41]
TOKENS = 10


class Adapters:
    """A checkpoint and adapters for it."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = make_checkpoint("llama-gqa", folder / "model")
        self.paths = {name: write_adapter(folder / name, self.checkpoint, seed=i) for i, name in enumerate("ab")}

    def tokens(self, name: str | None) -> list[int]:
        """Greedy tokens by transformers."""
        model: PreTrainedModel = merged(self.checkpoint, None if name is None else self.paths[name])
        ids = list(PROMPT)
        with torch.inference_mode():
            for _ in range(TOKENS):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(PROMPT) :]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def server(adapters: Adapters, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    before = shared_memory_names()
    arguments = ("--port", "0", "--served-model-name", "plain", "--kv-cache-memory-bytes", str(8 << 20))
    lora = ("--enable-lora", "--max-loras", "2", "--lora-modules", f"first={adapters.paths['a']}")
    folder = tmp_path_factory.mktemp("server")
    model = (str(adapters.checkpoint), "--dtype", "float32", "--max-model-len", "128")
    with ServerProcess(folder, *model, *arguments, *lora, MVLLM_ADMIN_API_KEY=ADMIN) as server:
        yield server.wait_ready()
    assert server.wait() == 0, server.log[-3000:]
    assert_nothing_left(server.tag, before)


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx2.Client]:
    with server.client() as client:
        yield client


def generated(client: httpx2.Client, model: str) -> list[int]:
    settings = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
    answer = client.post("/v1/completions", json={"model": model, "prompt": PROMPT, **settings})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def post(client: httpx2.Client, path: str, key: str | None = ADMIN, **body: Any) -> httpx2.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return client.post(path, json=body, headers=headers)


def cards(client: httpx2.Client) -> dict[str, Any]:
    return {card["id"]: card for card in client.get("/v1/models").json()["data"]}


def test_an_adapter_is_a_model_with_its_own_name(client: httpx2.Client, adapters: Adapters) -> None:
    listed = cards(client)
    assert list(listed) == ["plain", "first"]
    assert listed["first"]["parent"] == "plain" and listed["first"]["root"] == str(adapters.paths["a"])
    assert listed["plain"]["parent"] is None
    assert client.get("/v1/models/first").json()["id"] == "first"
    expected = adapters.tokens("a")
    assert generated(client, "first") == expected != generated(client, "plain")
    assert generated(client, "plain") == adapters.tokens(None)
    chat = {"model": "first", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    answer = client.post("/v1/chat/completions", json=chat).json()
    assert answer["model"] == "first", answer


def test_administrators_load_and_unload_adapters(client: httpx2.Client, adapters: Adapters) -> None:
    path = str(adapters.paths["b"])
    assert post(client, "/v1/load_lora_adapter", None, lora_name="second", lora_path=path).status_code == 403
    assert post(client, "/v1/unload_lora_adapter", None, lora_name="first").status_code == 403
    assert list(cards(client)) == ["plain", "first"]

    loaded = post(client, "/v1/load_lora_adapter", lora_name="second", lora_path=path)
    assert loaded.status_code == 200 and loaded.json()["id"] == "second", loaded.text
    assert generated(client, "second") == adapters.tokens("b")
    for name in ("second", "first", "plain"):  # the name is taken
        again = post(client, "/v1/load_lora_adapter", lora_name=name, lora_path=path)
        assert again.status_code == 400 and again.json()["error"]["param"] == "lora_name"

    assert post(client, "/v1/unload_lora_adapter", lora_name="second").status_code == 200
    assert post(client, "/v1/unload_lora_adapter", lora_name="second").status_code == 404
    assert client.post("/v1/completions", json={"model": "second", "prompt": "x"}).status_code == 404
    # The same name for another adapter: no cached prefix of the earlier adapter is reused.
    other = post(client, "/v1/load_lora_adapter", lora_name="second", lora_path=str(adapters.paths["a"]))
    assert other.status_code == 200
    assert generated(client, "second") == adapters.tokens("a")
    assert post(client, "/v1/unload_lora_adapter", lora_name="second").status_code == 200


def test_an_adapter_that_cannot_be_loaded_is_an_error_and_the_server_continues(
    client: httpx2.Client, adapters: Adapters, tmp_path: Path
) -> None:
    nan = write_adapter(tmp_path / "nan", adapters.checkpoint, targets=("q_proj",), size=float("nan"))
    for path, words in ((str(tmp_path / "nowhere"), "no adapter folder"), (str(nan), "NaN")):
        answer = post(client, "/v1/load_lora_adapter", lora_name="bad", lora_path=path)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
    assert post(client, "/v1/load_lora_adapter", lora_name="bad").status_code == 400
    assert list(cards(client)) == ["plain", "first"]
    assert client.post("/v1/embeddings", json={"model": "first", "input": "x"}).status_code == 400
    assert generated(client, "first") == adapters.tokens("a")


def test_administrators_pause_the_engine_and_replace_its_weights(
    client: httpx2.Client, adapters: Adapters, tmp_path: Path
) -> None:
    """In this file because its server has an administrator's key. The old weights are restored at the end."""
    changed = changed_copy(adapters.checkpoint, tmp_path / "changed")
    ask = {"model": "plain", "prompt": PROMPT, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    ask |= {"return_token_ids": True, "return_weight_versions": True}
    for path in ("/pause", "/resume", "/start_weight_update", "/update_weights", "/finish_weight_update"):
        assert post(client, path, None).status_code == 403
    assert client.get("/weight_info").status_code == 403
    key = {"Authorization": f"Bearer {ADMIN}"}
    old = client.post("/v1/completions", json=ask).json()["choices"][0]
    assert old["weight_versions"] == [[0, TOKENS]]

    assert client.post("/pause?mode=keep&clear_cache=false", headers=key).json() == {"is_paused": True}
    assert client.get("/is_paused", headers=key).json() == {"is_paused": True}
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(client.post, "/v1/completions", json=ask)
        assert post(client, "/start_weight_update").json()["is_updating"] is True
        wrong = post(client, "/update_weights", update_info={"path": str(tmp_path)})
        assert wrong.status_code == 400 and "nothing was written" in wrong.json()["error"]["message"]
        updated = post(client, "/update_weights", update_info={"path": str(changed)})
        assert updated.status_code == 200, updated.text
        assert post(client, "/finish_weight_update", weight_version=7).json()["weight_version"] == 7
        assert not waiting.done()
        assert client.post("/resume", headers=key).json() == {"is_paused": False}
        new = waiting.result().json()["choices"][0]
    assert new["weight_versions"] == [[7, TOKENS]] and new["token_ids"] != old["token_ids"]
    chat = {"model": "plain", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "ignore_eos": True}
    answer = client.post("/v1/chat/completions", json=chat | {"return_weight_versions": True}).json()
    assert answer["choices"][0]["weight_versions"] == [[7, 3]]

    assert post(client, "/collective_rpc", method="missing").status_code == 400
    shutil.copytree(adapters.paths["b"], adapters.paths["a"], dirs_exist_ok=True)
    assert post(client, "/v1/update_lora_adapter", lora_name="none").status_code == 404
    assert post(client, "/v1/update_lora_adapter", lora_name="first").json()["weight_version"] == 8
    restored = post(client, "/update_weights", update_info={"path": str(adapters.checkpoint)})
    assert restored.json() == {"weight_version": 9, "is_updating": False, "failure": None}
    assert generated(client, "plain") == old["token_ids"]
    assert generated(client, "first") == adapters.tokens("b")

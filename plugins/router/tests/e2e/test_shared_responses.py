"""Models of one server share stored responses in a file: no model has to be loaded, and a killed one loses none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from plugins.router.tests.builders import model_process, states

from tests.helpers.processes import assert_nothing_left, shared_memory_names, wait_until
from tests.helpers.server import ServerProcess

ENDLESS: dict[str, Any] = {"input": "Go on.", "max_output_tokens": 900, "ignore_eos": True, "temperature": 0}
MODELS = """
defaults: {kv-cache-memory-bytes: 64M, dtype: float32}
models:
  small: {model: demo, aliases: [gpt-4o]}
  other: {model: demo, load-format: dummy}
"""


def run_server(folder: Path) -> ServerProcess:
    (folder / "models.yaml").write_text(MODELS)
    arguments = ("--models", str(folder / "models.yaml"), "--max-loaded-models", "1", "--port", "0")
    return ServerProcess(folder, *arguments, "--responses-store", str(folder / "responses.db"))


@pytest.fixture
def nothing_is_left() -> Iterator[list[str]]:
    before, tags = shared_memory_names(), []  # type: ignore[var-annotated]
    yield tags
    for tag in tags:
        assert_nothing_left(tag, before)


def post(client: httpx2.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def get(client: httpx2.Client, response: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = client.get(f"/v1/responses/{response['id']}").json()
    return found


def test_models_share_responses_which_survive_unloads_and_sigkill(tmp_path: Path, nothing_is_left: list[str]) -> None:
    with run_server(tmp_path) as server, server.wait_ready().client() as client:
        nothing_is_left.append(server.tag)
        short = {"max_output_tokens": 4, "temperature": 0}
        first = post(client, "/v1/responses", model="small", input="What is the capital of Italy?", **short)
        conversation = post(client, "/v1/conversations", items=[{"role": "user", "content": "Hello."}])
        path = f"/v1/conversations/{conversation['id']}"
        on = {"previous_response_id": first["id"]}
        second = post(client, "/v1/responses", model="other", input="And of France?", **on, **short)
        assert states(client) == {"small": "unloaded", "gpt-4o": "unloaded", "other": "loaded"}
        assert get(client, first) == first and get(client, second) == second
        given = client.get(f"/v1/responses/{second['id']}/input_items?order=asc").json()["data"]
        assert [item["content"][0]["text"] for item in given[::2]] == [
            "What is the capital of Italy?",
            "And of France?",
        ]
        post(client, "/v1/responses", model="other", input="Who are you?", conversation=conversation["id"], **short)
        assert len(client.get(f"{path}/items").json()["data"]) == 3

        with httpx2.Client(base_url=server.url, timeout=60) as reader:
            stopped = post(client, "/v1/responses", model="gpt-4o", background=True, **ENDLESS)
            assert post(reader, f"/v1/responses/{stopped['id']}/cancel")["status"] == "cancelled"
        killed = post(client, "/v1/responses", model="gpt-4o", background=True, **ENDLESS)
        wait_until(lambda: get(client, killed)["status"] == "in_progress", 120, lambda: server.log)
        model_process(server, "small").kill()
        wait_until(lambda: get(client, killed)["status"] == "failed", 120, lambda: server.log)
        assert "ended before" in get(client, killed)["error"]["message"]
        assert client.delete(f"/v1/responses/{second['id']}").json()["deleted"]
    with run_server(tmp_path) as server, server.wait_ready().client() as client:
        nothing_is_left.append(server.tag)
        assert "0 were interrupted" in server.log
        assert (
            get(client, first) == first
            and "error" in get(client, second)
            and set(states(client).values()) == {"unloaded"}
        )

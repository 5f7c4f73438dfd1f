"""HTTP plugins on a real server: their routes need keys like the server's own, and a broken plugin does not harm the
server."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.helpers.plugins import ROOT, write_metadata
from tests.helpers.server import SMALL, ServerProcess, raw_post

KEY = {"Authorization": "Bearer secret"}
TEMPLATE = """{{- '<tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call>' -}}
{%- for message in messages -%}{{- message.content -}}{%- endfor -%}"""
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
RANK = {"question": "The capital of France is", "answers": [" Paris.", " xylophone zebra", " a"]}


def install_example(site: Path) -> list[str]:
    """The search path entry that installs mvllm-example-http."""
    folder = ROOT / "plugins" / "example-http"
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    [(name, value)] = project["entry-points"]["mvllm.http"].items()
    return [str(write_metadata(site, project["name"], f"[mvllm.http]\n{name} = {value}\n")), str(folder / "src")]


@pytest.fixture(scope="module")
def server_with_plugins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("plugged")
    path = [*install_example(folder / "site"), os.environ.get("PYTHONPATH", "")]
    broken = folder / "broken"
    path.insert(0, str(write_metadata(broken, "acme-routes", "[mvllm.http]\nacme = acme_routes:make_router\n")))
    (broken / "acme_routes.py").write_text("raise SystemExit('no licence')\n")
    arguments = ("--port", "0", "--http-plugins", "answers", "acme", "--max-body-bytes", "100000", *SMALL)
    arguments += ("--chat-template", TEMPLATE)
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, path)), "MVLLM_API_KEY": "secret"}
    with ServerProcess(folder, "demo", *arguments, **environment) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def client(server_with_plugins: ServerProcess) -> Iterator[httpx2.Client]:
    with server_with_plugins.client(headers=KEY) as client:
        yield client


def test_answers_are_ranked_by_the_log_probabilities_of_the_model(client: httpx2.Client) -> None:
    ranked = client.post("/plugins/answers/rank", json=RANK).json()["answers"]
    assert {entry["answer"] for entry in ranked} == set(RANK["answers"])
    expected = {}
    for answer in RANK["answers"]:
        ids = client.post("/tokenize", json={"prompt": RANK["question"]}).json()["tokens"]
        more = client.post("/tokenize", json={"prompt": answer, "add_special_tokens": False}).json()["tokens"]
        body = {"prompt": ids + more, "echo": True, "logprobs": 0, "max_tokens": 0}
        echoed = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]["token_logprobs"]
        expected[answer] = sum(echoed[len(ids) :])
    for entry in ranked:
        assert entry["logprob"] == pytest.approx(expected[entry["answer"]], abs=1e-4)
    assert [entry["answer"] for entry in ranked] == sorted(expected, key=lambda answer: -expected[answer])


def test_a_stream_has_the_lines_of_a_completion(client: httpx2.Client) -> None:
    body = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 60}
    expected = client.post("/v1/completions", json=body).json()["choices"][0]["text"].split("\n")
    ask = {"question": body["prompt"], "max_tokens": 60}
    answer = client.post("/plugins/answers/lines", json=ask)
    *events, done, end = answer.text.split("\n\n")
    assert [json.loads(event.removeprefix("data: "))["line"] for event in events] == expected
    assert (done, end) == ("data: [DONE]", "")
    refused = client.post("/plugins/answers/lines", json={**ask, "max_tokens": -1})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "rank", {**RANK, "answers": []}, 400),
        ("POST", "rank", {"question": 5, "answers": ["x"]}, 400),
        ("POST", "rank", {**RANK, "question": "word " * 30_000}, 413),
        ("GET", "count", None, 400),
        ("GET", "rank", None, 405),
        ("GET", "nothing", None, 404),
    ],
)
def test_errors_have_the_servers_format(
    client: httpx2.Client, method: str, path: str, body: object, status: int
) -> None:
    answer = client.request(method, f"/plugins/answers/{path}", json=body)
    assert answer.status_code == status, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_its_routes_need_the_key_and_are_in_the_openapi_schema(
    server_with_plugins: ServerProcess, client: httpx2.Client
) -> None:
    assert client.get("/plugins/answers/count", params={"text": "a b"}).json()["count"] > 0
    with server_with_plugins.client() as stranger:
        answer = stranger.post("/plugins/answers/rank", json=RANK)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert stranger.get("/plugins/acme").status_code == 401
    document = client.get("/openapi.json").json()
    assert "/plugins/answers/rank" in document["paths"] and "/v1/completions" in document["paths"]
    assert client.get("/docs").status_code == 200
    assert 'handler="/plugins/answers/..."' in client.get("/metrics").text
    assert b" 401 " in server_with_plugins.exchange(raw_post("/plugins/answers/rank", b"{}"))


def test_fields_that_a_route_does_not_know_are_reported(
    client: httpx2.Client, server_with_plugins: ServerProcess
) -> None:
    answer = client.post("/plugins/answers/rank", json={**RANK, "questoin": "x"})
    assert answer.status_code == 200 and answer.headers["x-mvllm-unknown-fields"] == "questoin"
    with (
        server_with_plugins.client(headers=KEY) as client,
        client.stream(
            "POST", "/v1/completions", json={"prompt": "x", "topk": 3, "stream": True, "max_tokens": 1}
        ) as stream,
    ):
        assert stream.headers["x-mvllm-unknown-fields"] == "topk"
    assert "unknown field topk of a request to /v1/completions. Did you mean top_k?" in server_with_plugins.log


def test_the_chat_template_selects_the_tool_parser(client: httpx2.Client, server_with_plugins: ServerProcess) -> None:
    """Not about plugins: this server's template contains a tool-call format."""
    assert "Tool call parser hermes: the chat template shows" in server_with_plugins.log
    ask = {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL], "max_tokens": 2}
    assert client.post("/v1/chat/completions", json=ask).status_code == 200


def test_a_plugin_that_raises_while_loading_loses_only_its_own_routes(
    server_with_plugins: ServerProcess, client: httpx2.Client
) -> None:
    for path in ("/plugins/acme/rank", "/plugins/acme/anything/else"):
        answer = client.get(path)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "plugin_failed"
    assert "acme-routes 0.1.0" in server_with_plugins.log and "no licence" in server_with_plugins.log
    assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_an_unknown_plugin_is_an_error_before_the_model_is_loaded(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "demo", "--port", "0", "--http-plugins", "nobody", *SMALL) as server:
        assert server.wait() == 1
        assert "'nobody'" in server.log and "mvllm.http" in server.log

"""Several models behind one server: loaded by name, unloaded when another needs the place, each in its own process."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import httpx2
import pytest
from plugins.router.tests.builders import ADMIN, complete, engine_core, load_only, loaded, model_process
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.processes import assert_nothing_left, shared_memory_names, tagged_processes, wait_until
from tests.helpers.server import ServerProcess, raw_post

MODELS = """
defaults: {kv-cache-memory-bytes: 64M, dtype: float32}
models:
  small: {model: demo, aliases: [gpt-4o]}
  other: {model: demo, keep-alive: 1h, max-concurrent-requests: 3}
  random: {model: demo, load-format: dummy, max-model-len: 256, env: {MARK_OF_THIS_MODEL: "1"}}
  broken: {model: /nowhere/at/all}
  wrong: {model: demo, max-model-len: 100000}
"""
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
LONG = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "temperature": 0, "stream": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    before = shared_memory_names()
    folder = tmp_path_factory.mktemp("models")
    (folder / "models.yaml").write_text(MODELS)
    arguments = ("--models", str(folder / "models.yaml"), "--port", "0", "--max-loaded-models", "2")
    with ServerProcess(folder, *arguments, MVLLM_ADMIN_API_KEY="boss") as server:
        yield server.wait_ready()
        with (
            server.client() as client,
            client.stream("POST", "/v1/completions", json=LONG | {"model": "small"}) as kept,
        ):
            lines = kept.iter_lines()
            next(lines)
            server.signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"  # it finished
    assert server.wait() == 0, server.log[-3000:]
    assert_nothing_left(server.tag, before)


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx2.Client]:
    with server.client() as client:
        yield client


def test_concurrent_first_requests_load_a_model_once_and_all_are_answered(
    server: ServerProcess, client: httpx2.Client
) -> None:
    assert loaded(client) == set()
    assert client.get("/health/ready").json() == {
        "status": "ok",
        "models": dict.fromkeys(("small", "other", "random", "broken", "wrong"), "unloaded"),
    }
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: complete(client, "small")["choices"][0]["text"], range(8)))
    assert len(set(answers)) == 1
    assert server.log.count("Loading the model small.") == 1


def test_the_page_needs_no_model_and_the_list_says_what_loaded_models_can_do(client: httpx2.Client) -> None:
    page = client.get("/", headers={"Accept": "text/html"})
    assert page.headers["content-type"].startswith("text/html") and 'id="model"' in page.text
    load_only(client, "small")
    cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
    for name in ("small", "gpt-4o"):
        assert "chat" in cards[name]["capabilities"] and cards[name]["input_modalities"] == ["text"]
        assert cards[name]["example_messages"]
    assert "capabilities" not in cards["broken"]


def test_each_api_reaches_the_model_by_its_name(client: httpx2.Client) -> None:
    chat = client.post("/v1/chat/completions", json={"model": "gpt-4o", "messages": QUESTION, "temperature": 0}).json()
    assert chat["model"] == "gpt-4o" and "Paris" in chat["choices"][0]["message"]["content"]
    body = {"model": "small", "messages": QUESTION, "max_tokens": 32, "temperature": 0, "stream": True}
    with client.stream("POST", "/v1/messages", json=body, headers={"anthropic-version": "2023-06-01"}) as stream:
        events = [line for line in stream.iter_lines() if line.startswith("event:")]
    assert events[0] == "event: message_start" and events[-1] == "event: message_stop"
    body = {"model": "small:latest", "messages": QUESTION, "options": {"temperature": 0}}
    with client.stream("POST", "/api/chat", json=body) as stream:
        lines = [json.loads(line) for line in stream.iter_lines()]
    assert "Paris" in "".join(line["message"]["content"] for line in lines) and lines[-1]["done"]
    stored = client.post("/v1/responses", json={"model": "small", "input": "Hello", "max_output_tokens": 4}).json()
    assert client.get(f"/v1/responses/{stored['id']}").json()["id"] == stored["id"]
    smuggled = quote("a HTTP/1.1\r\nHost: x\r\n\r\nPOST /sleep HTTP/1.1\r\nA: b", safe="")
    for name in ("resp_none", smuggled, "%00", "%0d%0a", "%20", "%E2%80%A8", "%FF", "..%2f..%2fmetrics"):
        assert client.get(f"/v1/responses/{name}").status_code == 404
        assert client.get(f"/v1/responses/{name}/input_items").status_code == 404
    assert client.get("/health/ready?model=small").json()["status"] == "ok", "no smuggled request was obeyed"
    assert complete(client, "random", max_tokens=2)["model"] == "random"


def test_a_request_without_a_known_model_is_refused_in_the_format_of_its_api(client: httpx2.Client) -> None:
    answer = client.post("/v1/chat/completions", json={"messages": QUESTION})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "model_missing"
    assert "small, other, random" in answer.json()["error"]["message"]
    answer = client.post("/api/chat", json={"model": "none", "messages": QUESTION})
    assert answer.status_code == 404 and "`none` does not exist" in answer.json()["error"]
    assert client.post("/v1/completions", content=b"{", headers={"content-type": "application/json"}).status_code == 400
    assert client.post("/v1/completions", content=b"model=small").status_code == 415
    assert client.post("/v1/nothing", json={"model": "small"}).status_code == 404
    assert client.put("/v1/completions", json={"model": "small"}).status_code == 405
    assert client.get("/tokenizer_of_none?model=none").status_code == 404


def test_the_least_recently_used_model_makes_room_and_its_processes_end(
    server: ServerProcess, client: httpx2.Client
) -> None:
    load_only(client, "random", "small")
    gone = model_process(server, "random"), engine_core(server, "random")
    assert gone[0].environ()["MARK_OF_THIS_MODEL"] == "1"
    complete(client, "other")
    assert loaded(client) == {"small", "other"}
    wait_until(
        lambda: not any(each.is_running() for each in gone), 120, "the processes of the unloaded model have ended"
    )


def test_a_model_in_use_is_not_unloaded_and_its_stream_is_complete(
    server: ServerProcess, client: httpx2.Client
) -> None:
    load_only(client, "small", "other")
    with client.stream("POST", "/v1/completions", json=LONG | {"model": "small"}) as stream:
        lines = stream.iter_lines()
        next(lines)
        complete(client, "other")
        complete(client, "random")  # `other` was used last, but is idle
        assert loaded(client) == {"small", "random"}
        events = [line for line in lines if line]
    assert events[-1] == "data: [DONE]" and len(events) > 100


@pytest.mark.exhaustive  # the unit tests of the pool have it, with fakes
def test_a_busy_model_drains_for_another_whose_request_waits(server: ServerProcess, client: httpx2.Client) -> None:
    load_only(client, "small", "other")
    bodies = [LONG | {"model": name, "stream": False} for name in ("small", "other")]
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(client.post, "/v1/completions", json=body) for body in bodies]
        wait_until(lambda: client.get("/load").json()["num_requests_running"] == 2, 120, "both run")
        third = pool.submit(complete, client, "random", max_tokens=2)
        answers = [each.result() for each in running]
        assert third.result()["usage"]["completion_tokens"] == 2
    assert [each.json()["usage"]["completion_tokens"] for each in answers] == [900, 900]


def test_a_model_that_cannot_be_loaded_says_why_and_leaves_the_others_alone(client: httpx2.Client) -> None:
    load_only(client, "random", "small")  # `random` makes room
    answer = client.post("/v1/completions", json={"model": "broken", "prompt": "x"})
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["code"] == "model_load_failed"
    assert "'/nowhere/at/all' was not found" in answer.json()["error"]["message"]
    assert loaded(client) == {"small", "random"}  # its files were looked for first
    answer = client.post("/api/generate", json={"model": "wrong", "prompt": "x"})
    assert answer.status_code == 503 and "max_model_len" in answer.json()["error"]
    [card] = [card for card in client.get("/v1/models").json()["data"] if card["id"] == "wrong"]
    assert card["status"]["failed"] and "max_model_len" in card["status"]["error"]
    assert loaded(client) == {"small"}
    complete(client, "small")


def test_stored_completions_and_counted_tokens(client: httpx2.Client) -> None:
    ask = {"model": "small", "messages": QUESTION, "max_tokens": 4}
    made = client.post("/v1/chat/completions", json={**ask, "store": True}).json()
    path = f"/v1/chat/completions/{made['id']}"
    assert client.get(path).json() == {**made, "metadata": {}}
    assert [each["id"] for each in client.get("/v1/chat/completions?model=small").json()["data"]] == [made["id"]]
    assert client.get(f"{path}/messages").json()["data"][0]["content"] == QUESTION[0]["content"]
    assert client.delete(path).json()["deleted"] and client.get(path).status_code == 404
    body = {"model": "small", "input": QUESTION[0]["content"]}
    answer = client.post("/v1/responses/input_tokens", json=body)
    assert answer.status_code == 200, answer.text
    counted = answer.json()["input_tokens"]
    assert counted == made["usage"]["prompt_tokens"]
    assert client.post("/v1/responses/compact", json=body).status_code == 404
    for path in ("/api/tags", "/v1/models", "/health", "/tokenizer_info?model=small", "/"):
        head = client.head(path)
        assert head.status_code == 200 and head.content == b"", path


def test_metrics_and_the_list_have_every_model(client: httpx2.Client) -> None:
    load_only(client, "small", "other")
    families = {each.name: each for each in text_string_to_metric_families(client.get("/metrics").text)}
    tokens = {each.labels["model_name"] for each in families["mvllm:generation_tokens"].samples}
    assert tokens == {"small", "other"}
    state = {each.labels["model_name"]: each.value for each in families["mvllm:model_loaded"].samples}
    assert state == {"small": 1, "other": 1, "random": 0, "broken": 0, "wrong": 0}
    reasons = {each.labels["reason"] for each in families["mvllm:model_unloads"].samples}
    assert "room" in reasons
    cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
    assert list(cards) == ["small", "gpt-4o", "other", "random", "broken", "wrong"]
    assert cards["random"]["max_model_len"] == 256 and cards["gpt-4o"]["root"] == "demo"
    assert client.get("/v1/models/gpt-4o").json() == cards["gpt-4o"]
    assert client.get("/v1/models/none").status_code == 404
    entry = client.get("/v1/models/small", headers={"anthropic-version": "2023-06-01"}).json()
    assert entry["type"] == "model" and entry["max_input_tokens"] == cards["small"]["max_model_len"]


def test_a_model_that_dies_ends_its_streams_with_an_error_and_only_these(
    server: ServerProcess, client: httpx2.Client
) -> None:
    load_only(client, "small", "other")
    last: dict[str, str] = {}
    begun = {name: threading.Event() for name in ("small", "other")}

    def read(name: str) -> None:
        with client.stream("POST", "/v1/completions", json=LONG | {"model": name}) as stream:
            for line in stream.iter_lines():
                begun[name].set()
                last[name] = line if "error" in line else last.get(name, "")

    victim = model_process(server, "small").pid
    threads = [threading.Thread(target=read, args=(name,)) for name in ("other", "small")]
    for thread, name in zip(threads, ("other", "small"), strict=True):
        thread.start()
        assert begun[name].wait(120)
    os.kill(victim, signal.SIGKILL)  # at once: the stream that has just begun takes about a second
    for thread in threads:
        thread.join(120)
    assert "model_stopped" in last["small"] and last["other"] == ""
    wait_until(lambda: "small" not in loaded(client), 120, "the death is noticed")
    core = engine_core(server, "other")
    complete(client, "small")
    core.kill()  # of the other one, only the engine
    wait_until(lambda: "other" not in loaded(client), 120, "the death is noticed")
    assert client.get("/health").status_code == 200 and "death" in client.get("/metrics").text


def test_a_client_that_disconnects_aborts_its_request(server: ServerProcess, client: httpx2.Client) -> None:
    load_only(client, "small")
    before = client.get("/metrics?model=small").text
    body = json.dumps(LONG | {"model": "small"}).encode()
    assert b"data:" in server.exchange(raw_post("/v1/completions", body), close_after=2000)

    def is_idle() -> bool:
        load = client.get("/load?model=small").json()
        return not load["num_requests_running"] and not client.get("/load").json()["num_requests_running"]

    wait_until(is_idle, 120, "the request has been aborted")
    aborted = [
        line for line in client.get("/metrics?model=small").text.splitlines() if 'finished_reason="abort"' in line
    ]
    assert aborted and aborted[0] not in before


def test_a_client_that_reads_late_gets_the_whole_stream(server: ServerProcess, client: httpx2.Client) -> None:
    load_only(client, "small")
    with socket.create_connection(server.address, timeout=120) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps(LONG | {"model": "small", "logprobs": 20}).encode()
        connection.sendall(raw_post("/v1/completions", body))
        complete(client, "small")  # others are served meanwhile
        received = b""
        while piece := connection.recv(1 << 16):
            received += piece
    assert received.count(b"data: ") > 100 and b"data: [DONE]" in received


def test_ollamas_clients_load_and_unload_with_keep_alive(client: httpx2.Client) -> None:
    load_only(client, "small")
    answer = client.post("/api/generate", json={"model": "small", "keep_alive": 0}).json()
    assert answer["done_reason"] == "unload" and loaded(client) == set()
    ask = {"model": "other", "messages": QUESTION, "options": {"num_predict": 4}, "stream": False}
    waited, at_once = client.post("/api/chat", json=ask).json(), client.post("/api/chat", json=ask).json()
    assert waited["total_duration"] > waited["load_duration"] > at_once["load_duration"] > 0
    answer = client.post("/api/generate", json={"model": "other", "keep_alive": "30m"}).json()
    assert answer["done_reason"] == "load" and loaded(client) == {"other"}
    [entry] = client.get("/api/ps").json()["models"]
    assert entry["name"] == "other:latest" and entry["expires_at"] < "9999" and entry["size_vram"] > 0
    tags = {entry["name"]: entry for entry in client.get("/api/tags").json()["models"]}
    assert tags["other:latest"]["details"]["family"] and tags["small:latest"]["size"] > 0
    assert client.post("/api/show", json={"model": "other"}).json()["model_info"]
    assert client.post("/api/show", json={"model": "broken"}).status_code == 200
    assert loaded(client) == {"other"}  # a list of details loads nothing
    body = {"model": "other", "prompt": "Once", "stream": False, "options": {"num_predict": 2}, "keep_alive": 0}
    assert client.post("/api/generate", json=body).json()["response"]
    wait_until(lambda: loaded(client) == set(), 120, "it is unloaded after the request")
    assert client.post("/api/generate", json={"model": "other", "keep_alive": "soon"}).status_code == 400


def test_administrators_load_and_unload_by_name(client: httpx2.Client) -> None:
    load_only(client)
    assert client.get("/metrics?model=small").status_code == 503  # a look loads nothing
    assert client.post("/models/load", json={"model": "small"}).status_code == 403
    assert client.post("/models/load", json={"model": "gpt-4o"}, headers=ADMIN).json()["success"]
    assert loaded(client) == {"small"}
    assert client.get("/server_info?model=small", headers=ADMIN).json()["model"]["model"] == "demo"
    assert client.post("/reset_prefix_cache?model=small").status_code == 403
    assert client.post("/reset_prefix_cache?model=small", headers=ADMIN).json() == {"reset": True}
    assert client.post("/models/unload", json={"model": "small"}, headers=ADMIN).json()["was_loaded"]
    assert not client.post("/models/unload", json={"model": "small"}, headers=ADMIN).json()["was_loaded"]
    assert 'model_unloads_total{model_name="small",reason="request"}' in client.get("/metrics").text
    assert client.post("/models/unload", json={"model": "none"}, headers=ADMIN).status_code == 404


@pytest.mark.exhaustive
def test_a_model_has_its_own_limit_of_requests(client: httpx2.Client) -> None:
    load_only(client, "other")
    body = {"model": "other", "prompt": "x", "max_tokens": 400, "ignore_eos": True}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: client.post("/v1/completions", json=body), range(8)))
    assert {each.status_code for each in answers} == {200, 429}
    assert sum(each.status_code == 200 for each in answers) >= 3
    refused = next(each for each in answers if each.status_code == 429)
    assert refused.headers["retry-after"] == "1" and "may have 3 requests" in refused.json()["error"]["message"]


def test_a_router_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    before = shared_memory_names()
    (tmp_path / "models.toml").write_text('[models.m]\nmodel = "demo"\npinned = true\nkv-cache-memory-bytes = "64M"\n')
    with ServerProcess(tmp_path, "--models", str(tmp_path / "models.toml"), "--port", "0") as server:
        server.wait_ready()  # the pinned model is loaded
        with server.client() as client:
            assert loaded(client) == {"m"}
            assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
            assert client.post("/api/generate", json={"model": "m", "keep_alive": 0}).json()["done_reason"] == "load"
        server.signal(signal.SIGKILL)
        server.wait()
        wait_until(lambda: not tagged_processes(server.tag), 120, "all processes have ended")
    assert_nothing_left(server.tag, before)

"""Servers that compute prompts, servers that generate, and a router in front; some are killed."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tests.helpers.processes import assert_nothing_left, shared_memory_names, wait_until
from tests.helpers.server import SMALL, ServerProcess

PROMPT = "The capital of France is a city of many names, and the river that flows through it has one. " * 3
REQUEST = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
QUESTION = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 24, "temperature": 0}
ENGINE = ("demo", "--port", "0", "--dtype", "float32", *SMALL)
KEY = {"MVLLM_KV_TRANSFER_KEY": "a key of engines in tests, shared"}

pytestmark = pytest.mark.exhaustive


class RouterProcess(ServerProcess):
    """A `mvllm router` process."""

    command = "router"

    @property
    def url(self) -> str:
        self.wait_for_log(r"Ready at (http\S+);")
        found = re.search(r"Ready at (http\S+);", self.log)
        assert found
        return found[1]


class Cluster:
    """A server of each kind, and a router."""

    def __init__(self, folder: Path, connector: str) -> None:
        self._folder, self._connector = folder, connector
        self.prefill, self.decode = self.engine("producer"), self.engine("consumer")
        urls = ("--prefill", self.prefill.url, "--decode", self.decode.url)
        self.router = RouterProcess(folder, *urls, "--port", "0", "--prefill-timeout", "20")
        for server in self.servers:
            server.wait_ready()

    @property
    def servers(self) -> list[ServerProcess]:
        return [self.prefill, self.decode, self.router]

    def engine(self, role: str) -> ServerProcess:
        if self._connector == "shared_memory":
            return ServerProcess(self._folder, *ENGINE, "--kv-role", role)
        options: dict[str, Any] = {"lookup_seconds": 2.0, "step_seconds": 1.0, "hold_seconds": 5.0}
        if role == "consumer":
            options["peers"] = ["127.0.0.1"]
        transfer = {"kv_connector": self._connector, "kv_role": role, "kv_connector_extra_config": options}
        return ServerProcess(self._folder, *ENGINE, "--kv-transfer-config", json.dumps(transfer), **KEY)


@pytest.fixture(scope="module", params=["shared_memory", "tcp"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    before = shared_memory_names()
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), request.param)
    servers = cluster.servers
    yield cluster
    cluster.router.signal(signal.SIGTERM)
    assert cluster.router.wait() == 0, cluster.router.log[-3000:]
    for server in {*servers, *cluster.servers}:
        server.end()
        assert_nothing_left(server.tag, before)


def tokens(client: httpx2.Client, request: dict[str, Any] = REQUEST) -> str:
    path = "/v1/chat/completions" if "messages" in request else "/v1/completions"
    response = client.post(path, json=request)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice["message"]["content"] if "messages" in request else choice["text"]


def expected(cluster: Cluster, request: dict[str, Any] = REQUEST) -> str:
    with cluster.decode.client() as client:
        return tokens(client, request | {"cache_salt": f"{time.monotonic_ns()}"})


def num_transferred(server: ServerProcess) -> float:
    """Blocks that the server has loaded from others."""
    with server.client() as client:
        metrics = client.get("/metrics").text
    found = re.findall(r"^mvllm:kv_tier_loaded_blocks_total\{.*(?:tcp|shared_memory).*\} (\S+)$", metrics, re.MULTILINE)
    return sum(map(float, found))


def test_the_router_gives_the_tokens_of_one_server(cluster: Cluster) -> None:
    before = num_transferred(cluster.decode)
    with cluster.router.client() as client:
        for request in (REQUEST, QUESTION):
            reference = expected(cluster, request)
            assert tokens(client, request | {"cache_salt": "router"}) == reference
        assert client.get("/v1/models").json()["data"][0]["id"] == "demo"
        assert client.get("/health").status_code == 200
    wait_until(lambda: num_transferred(cluster.decode) > before, 120, lambda: cluster.decode.log[-3000:])


def test_streams_pass(cluster: Cluster) -> None:
    reference = expected(cluster)
    text = ""
    with (
        cluster.router.client() as client,
        client.stream("POST", "/v1/completions", json=REQUEST | {"stream": True, "cache_salt": "stream"}) as response,
    ):
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        text += json.loads(line)["choices"][0]["text"]
    assert text == reference


def test_the_two_requests_can_be_sent_by_hand(cluster: Cluster) -> None:
    salted = REQUEST | {"cache_salt": "by hand"}
    with cluster.prefill.client() as client:
        first = client.post(
            "/v1/completions", json=salted | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        )
    params = first.json()["kv_transfer_params"]
    assert params["do_remote_prefill"] is True
    with cluster.decode.client() as client:
        response = client.post("/v1/completions", json=salted | {"kv_transfer_params": params}).json()
        assert response["choices"][0]["text"] == expected(cluster)
        assert response["kv_transfer_params"] is None
        assert client.post("/v1/completions", json=REQUEST | {"kv_transfer_params": [1]}).status_code == 400
        huge = client.post("/v1/completions", json=REQUEST | {"kv_transfer_params": {"x": "y" * 70_000}})
        assert huge.status_code == 400 and "kv_transfer_params" in huge.text


def test_a_killed_prefill_server_is_not_missed(cluster: Cluster) -> None:
    reference = expected(cluster)
    core = cluster.prefill.engine_core()
    core.suspend()
    with cluster.router.client() as client:
        timer = threading.Timer(1.0, core.kill)  # in the middle of the prompt
        timer.start()
        assert tokens(client, REQUEST | {"cache_salt": "killed"}) == reference
        timer.join()
        cluster.prefill.wait()
        assert tokens(client, REQUEST | {"cache_salt": "gone"}) == reference
        assert client.get("/health").status_code == 200


def test_a_killed_decode_server_ends_its_streams_with_an_error(cluster: Cluster) -> None:
    long = REQUEST | {"max_tokens": 700, "stream": True, "n": 16, "temperature": 1.0}
    with cluster.router.client() as client:
        with client.stream("POST", "/v1/completions", json=long) as response:
            lines = (line for line in response.iter_lines() if line)
            first = next(lines)
            assert response.status_code == 200, first
            psutil.Process(cluster.decode.process.pid).kill()
            *_, error, end = [first, *lines]
        assert "model_stopped" in error and end == "data: [DONE]", (error, end)
        if cluster.prefill.process.poll() is None:  # then it generates
            assert client.post("/v1/completions", json=REQUEST).status_code == 200
            cluster.prefill.process.kill()
            cluster.prefill.wait()
        answer = client.post("/v1/completions", json=REQUEST)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        wait_until(lambda: client.get("/health").status_code == 503, 120, "the router is ready without engines")

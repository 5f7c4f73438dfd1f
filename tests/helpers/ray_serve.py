"""A Ray cluster of three nodes on this machine with Ray Serve, and clients that load an application."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster

from mvllm_ray.serve import build_app
from mvllm_ray.serve.app import deployment_name
from tests.helpers.processes import wait_until

APP = "mvllm"
OPTIONS = {"max_model_len": 512, "kv_cache_memory_bytes": 16 << 20, "max_num_seqs": 16}
"""Of the demo model's servers in tests."""
START_SECONDS = 120


@dataclass
class ServeCluster:
    """The cluster: a head node and two more, with one core each.

    Attributes:
        nodes: The nodes besides the head.
        url: Of Serve's HTTP proxy, on the head node.
    """

    cluster: Any
    nodes: list[Any]
    url: str

    def deploy(self, *, wait: bool = True, ingress: dict[str, Any] | None = None, **model: Any) -> None:
        """Runs or changes the application: one model, by default the demo model."""
        settings = {"name": "demo", "options": OPTIONS, "start_timeout": START_SECONDS, **model}
        self.deploy_models([settings], wait=wait, ingress=ingress)

    def deploy_models(
        self, models: list[dict[str, Any]], *, wait: bool = True, ingress: dict[str, Any] | None = None
    ) -> None:
        """Runs or changes the application."""
        app = build_app({"models": models, "ingress": ingress or {}})
        serve.api._run(app, _blocking=wait, name=APP, route_prefix="/")

    def replicas(self, model: str = "demo") -> dict[str, int]:
        """Number of a model's replicas by their state, such as RUNNING."""
        app = serve.status().applications.get(APP)
        deployment = None if app is None else app.deployments.get(deployment_name(model))
        return (
            {} if deployment is None else {str(k).split(".")[-1]: v for k, v in deployment.replica_states.items() if v}
        )

    def wait_for_replicas(self, count: int, model: str = "demo", seconds: float = 60) -> None:
        wait_until(lambda: self.replicas(model) == {"RUNNING": count}, seconds, f"{count} replicas run")

    def replica_nodes(self, model: str = "demo") -> dict[str, str]:
        """The node of each running replica, by the replica's id."""
        from ray.serve._private.api import _get_global_client

        details = _get_global_client().get_serve_details()
        replicas = details["applications"][APP]["deployments"][deployment_name(model)]["replicas"]
        return {each["replica_id"].split("#")[-1]: each["node_id"] for each in replicas if each["state"] == "RUNNING"}

    def delete(self) -> None:
        """Deletes the application, and waits until its resources are free."""
        serve.delete(APP)
        wait_until(lambda: APP not in serve.status().applications, 60, "the application is deleted")
        wait_until(lambda: ray.available_resources().get("CPU") == 3, 60, "its resources are free")

    def kill_node(self, node: Any) -> None:
        """Kills a node and all its processes."""
        self.cluster.remove_node(node, allow_graceful=False)
        self.nodes.remove(node)

    def add_node(self) -> None:
        self.nodes.append(self.cluster.add_node(num_cpus=1))
        wait_until(lambda: ray.cluster_resources().get("CPU") == 3, 120, "the node has joined")


@contextlib.contextmanager
def serve_cluster() -> Iterator[ServeCluster]:
    """Starts the cluster; at the end nothing of it is left."""
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # Ray's 15 would give actors almost no time beside other tests
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),  # of every process that Ray starts
    }
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        cluster = Cluster(shutdown_at_exit=True)
        try:
            cluster.add_node(num_cpus=1, include_dashboard=False)
            nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
            ray.init(
                address=cluster.address,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                namespace="serve",
            )
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]
            serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
            yield ServeCluster(cluster, nodes, f"http://127.0.0.1:{port}")
        finally:
            with contextlib.suppress(Exception):
                serve.shutdown()
            ray.shutdown()
            cluster.shutdown()
            for number, handler in handlers.items():
                signal.signal(number, handler)


@dataclass
class Outcome:
    """How a request ended.

    Attributes:
        status: Of the response; 0 if the connection failed.
        replica: The replica that answered, where one did.
        error: The error of a response or of a stream; None if the answer is complete.
        retry_after: The header of that name.
        text: The generated text.
        num_cached, num_prompt: Tokens of the prompt that were in the cache, and all.
    """

    status: int
    replica: str | None = None
    error: dict[str, Any] | None = None
    retry_after: str | None = None
    text: str = ""
    num_cached: int = 0
    num_prompt: int = 0
    failure: str = ""
    ended: float = field(default_factory=time.monotonic)

    @property
    def is_complete(self) -> bool:
        return self.status == 200 and self.error is None and not self.failure


async def complete(client: httpx2.AsyncClient, *, stream: bool, **body: Any) -> Outcome:
    """One completion of the demo model."""
    body = {"model": "demo", "prompt": "Once upon a time", "temperature": 0, "stream": stream, **body}
    if stream:
        body["stream_options"] = {"include_usage": True}
    outcome = Outcome(0)
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            outcome.status = response.status_code
            outcome.replica = response.headers.get("x-mvllm-replica")
            outcome.retry_after = response.headers.get("retry-after")
            if not stream or response.status_code != 200:
                _read(outcome, httpx2.Response(200, content=await response.aread()).json())
            else:
                await _read_stream(outcome, response)
    except httpx2.HTTPError as e:
        outcome.failure = repr(e)
    outcome.ended = time.monotonic()
    return outcome


async def _read_stream(outcome: Outcome, response: httpx2.Response) -> None:
    import json

    has_ended = False
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            has_ended = True
        elif line.startswith("data: "):
            _read(outcome, json.loads(line.removeprefix("data: ")))
    if not has_ended:
        outcome.failure = "the stream has no end"


def _read(outcome: Outcome, content: dict[str, Any]) -> None:
    outcome.error = outcome.error or content.get("error")
    for choice in content.get("choices", ()):
        outcome.text += choice.get("text", "")
    if usage := content.get("usage"):
        outcome.num_prompt = usage["prompt_tokens"]
        outcome.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


class Load:
    """Clients that send one request after the other, in a thread of their own.

    Args:
        url: Of the server.
        num_clients: Number of clients; every second one streams.
        body: Fields of the requests.
        max_seconds: They stop by themselves after that.
    """

    def __init__(self, url: str, num_clients: int, *, max_seconds: float = 120, **body: Any) -> None:
        self.outcomes: list[Outcome] = []
        self._url, self._num_clients, self._body, self._max_seconds = url, num_clients, body, max_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._stop.set()
        self._thread.join(self._max_seconds)
        assert not self._thread.is_alive()

    def wait_for(self, count: int, seconds: float = 60) -> None:
        """Waits until `count` more requests have ended."""
        target = len(self.outcomes) + count
        wait_until(lambda: len(self.outcomes) >= target, seconds, f"{count} more requests have ended")

    async def _run(self) -> None:
        deadline = time.monotonic() + self._max_seconds
        async with httpx2.AsyncClient(
            base_url=self._url, timeout=60, limits=httpx2.Limits(max_connections=None)
        ) as client:

            async def one_after_the_other(stream: bool) -> None:
                while not self._stop.is_set() and time.monotonic() < deadline:
                    self.outcomes.append(await complete(client, stream=stream, **self._body))

            await asyncio.gather(*(one_after_the_other(i % 2 == 0) for i in range(self._num_clients)))


def run_all(url: str, bodies: Sequence[dict[str, Any]], concurrency: int = 1) -> list[Outcome]:
    """Sends requests in order, at most some at once; returns their outcomes in order."""

    async def run() -> list[Outcome]:
        limit = asyncio.Semaphore(concurrency)
        async with httpx2.AsyncClient(base_url=url, timeout=60) as client:

            async def one(body: dict[str, Any]) -> Outcome:
                async with limit:
                    return await complete(client, stream=False, **body)

            return await asyncio.gather(*map(one, bodies))

    return asyncio.run(run())


def until_complete(ask: Callable[[], Outcome], seconds: float = 30) -> Outcome:
    """Repeats a request as a client does that heeds Retry-After, until it is answered."""
    deadline = time.monotonic() + seconds
    while True:
        outcome = ask()
        if outcome.is_complete or time.monotonic() > deadline:
            return outcome
        time.sleep(min(float(outcome.retry_after or 0.2), 1))

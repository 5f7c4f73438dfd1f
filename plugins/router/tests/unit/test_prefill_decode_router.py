"""`mvllm router`: a prompt is computed by one engine and continued by another, or by one alone if the other is gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import pytest
from prometheus_client import CollectorRegistry

from mvllm.entrypoints.cli.main import main
from mvllm.entrypoints.openai.server.app import add_middleware
from mvllm.entrypoints.openai.server.http_metrics import HTTPMetrics
from mvllm.entrypoints.openai.server.settings import ServerSettings
from mvllm.errors import ConfigError
from mvllm_router.prefill_decode_app import PrefillDecodeApp
from mvllm_router.remote_server import RemoteServer

PARAMS = {"do_remote_prefill": True, "remote_request_id": "0:r"}
MESSAGES = [{"role": "user", "content": "Hello"}]


class Engine:
    """A server that records requests. `answer` returns status and body, or None to end the connection.

    Attributes:
        requests: (path, headers, body) of each.
    """

    def __init__(self, answer: Callable[[str, Any], tuple[int, Any] | None]) -> None:
        self.answer = answer
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.part: bytes | None = None
        self.delay = 0.0
        self.was_left = asyncio.Event()

    @property
    def bodies(self) -> list[Any]:
        return [body for path, _, body in self.requests if path != "/health/ready"]

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                path = head[0].split(" ")[1]
                headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
                content = await reader.readexactly(int(headers.get("content-length", 0)))
                body = json.loads(content) if content else None
                self.requests.append((path, headers, body))
                if self.delay:
                    await self._wait(reader)
                answer = self.answer(path, body)
                if answer is None:
                    writer.transport.abort()
                    return
                status, response = answer
                data = json.dumps(response).encode()
                length = len(data) + (0 if self.part is None else 100)
                writer.write(
                    b"HTTP/1.1 %d x\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n"
                    % (status, b"text/event-stream" if self.part else b"application/json", length)
                )
                writer.write(data if self.part is None else self.part)
                if self.part is not None:
                    await writer.drain()
                    writer.close()
                    return

    async def _wait(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(TimeoutError):
            if await asyncio.wait_for(reader.read(1), self.delay) == b"":
                self.was_left.set()

    _writers: list[asyncio.StreamWriter]


def make_engine(answer: Callable[[str, Any], tuple[int, Any] | None]) -> Engine:
    engine = Engine(answer)
    engine._writers = []
    return engine


def prefill_answer(path: str, body: Any) -> tuple[int, Any]:
    wants = (body or {}).get("kv_transfer_params", {}).get("do_remote_decode")
    return 200, {"from": "prefill", **({"kv_transfer_params": PARAMS} if wants else {})}


def decode_answer(path: str, body: Any) -> tuple[int, Any]:
    return 200, {"from": "decode"}


def run(
    test: Callable[[httpx2.AsyncClient, list[Engine], list[Engine]], Awaitable[None]],
    num_prefill: int = 1,
    num_decode: int = 1,
    prefill_timeout: float = 5.0,
) -> None:
    """Runs a test with a client of the router, and its engines."""

    async def with_engines() -> None:
        prefill = [make_engine(prefill_answer) for _ in range(num_prefill)]
        decode = [make_engine(decode_answer) for _ in range(num_decode)]
        for engine in (*prefill, *decode):
            await engine.start()
        metrics, settings = HTTPMetrics(CollectorRegistry()), ServerSettings(access_log=False)
        servers = [[RemoteServer(engine.url) for engine in group] for group in (prefill, decode)]
        app = PrefillDecodeApp(servers[0], servers[1], settings, prefill_timeout, metrics)
        transport = httpx2.ASGITransport(add_middleware(app, metrics, settings))
        async with httpx2.AsyncClient(transport=transport, base_url="http://router") as client:
            await test(client, prefill, decode)
        for server in (*servers[0], *servers[1]):
            server.close()
        for engine in (*prefill, *decode):
            await engine.stop()

    asyncio.run(asyncio.wait_for(with_engines(), 120))


def test_the_prompt_is_computed_by_one_engine_and_continued_by_another():
    async def test(client, prefill, decode):
        body = {
            "model": "m",
            "messages": MESSAGES,
            "tools": [{"type": "function"}],
            "max_tokens": 50,
            "min_tokens": 5,
            "stream": True,
            "stream_options": {"include_usage": True},
            "n": 2,
            "logprobs": True,
            "response_format": {"type": "json_object"},
            "kv_transfer_params": {"remote_host": "a client's"},
        }
        headers = {"authorization": "Bearer key"}
        response = await client.post("/v1/chat/completions", json=body, headers=headers)
        assert (response.status_code, response.json()) == (200, {"from": "decode"})
        [(path, prefill_headers, asked)] = prefill[0].requests
        assert path == "/v1/chat/completions"
        assert asked == {
            "model": "m",
            "messages": MESSAGES,
            "tools": [{"type": "function"}],
            "max_completion_tokens": 1,
            "kv_transfer_params": {"do_remote_decode": True},
        }
        [(_, decode_headers, continued)] = decode[0].requests
        assert continued == {**body, "kv_transfer_params": PARAMS}
        assert prefill_headers["authorization"] == decode_headers["authorization"] == "bearer key"
        assert prefill_headers["x-request-id"] == decode_headers["x-request-id"]

    run(test)


def test_completions_are_split_likewise():
    async def test(client, prefill, decode):
        await client.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 7, "echo": True})
        transfer = {"kv_transfer_params": {"do_remote_decode": True}}
        assert prefill[0].bodies == [{"prompt": [1, 2], "max_tokens": 1, **transfer}]
        assert decode[0].bodies == [
            {"prompt": [1, 2], "max_tokens": 7, "echo": True, "kv_transfer_params": PARAMS},
        ]

    run(test)


@pytest.mark.parametrize(
    "answer", [None, (500, {}), (503, {}), (400, {}), (200, {}), (200, []), (200, {"a": 1})], ids=str
)
def test_without_an_answer_of_a_prefill_engine_the_decode_engine_computes_the_prompt(answer):
    async def test(client, prefill, decode):
        prefill[0].answer = lambda path, body: answer
        response = await client.post("/v1/completions", json={"prompt": "a", "kv_transfer_params": {"x": 1}})
        assert response.json() == {"from": "decode"}
        assert decode[0].bodies == [{"prompt": "a"}]

    run(test)


def test_a_prefill_engine_that_is_gone_is_replaced_by_another():
    async def test(client, prefill, decode):
        await prefill[0].stop()
        for _ in range(3):
            await client.post("/v1/completions", json={"prompt": "a"})
        assert len(prefill[1].bodies) == 3
        assert all(body["kv_transfer_params"] == PARAMS for body in decode[0].bodies)

    run(test, num_prefill=2)


def test_a_prefill_engine_that_hangs_is_waited_for_only_so_long():
    async def test(client, prefill, decode):
        prefill[0].delay = 10
        response = await client.post("/v1/completions", json={"prompt": "a"})
        assert response.json() == {"from": "decode"}
        assert decode[0].bodies == [{"prompt": "a"}]
        await asyncio.wait_for(prefill[0].was_left.wait(), 120)

    run(test, prefill_timeout=0.2)


def test_a_decode_engine_that_is_gone_or_dies_before_its_answer_is_replaced():
    async def test(client, prefill, decode):
        await decode[0].stop()
        decode[1].answer = lambda path, body: None
        for _ in range(2):
            response = await client.post("/v1/completions", json={"prompt": "a"})
            assert response.json() == {"from": "decode"}
        assert decode[1].bodies and len(decode[2].bodies) == 2

    run(test, num_decode=3)


def test_a_decode_engine_that_is_not_ready_is_replaced():
    async def test(client, prefill, decode):
        decode[0].answer = decode[1].answer = lambda path, body: (503, {})
        assert (await client.post("/v1/completions", json={"prompt": "a"})).json() == {"from": "prefill"}
        prefill[0].answer = lambda path, body: (503, {"error": "busy"})
        response = await client.post("/v1/completions", json={"prompt": "a"})
        assert (response.status_code, response.json()) == (503, {"error": "busy"})

    run(test, num_decode=2)


def test_without_decode_engines_a_prefill_engine_generates():
    async def test(client, prefill, decode):
        await decode[0].stop()
        response = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 9})
        assert response.json() == {"from": "prefill"}
        assert prefill[0].bodies[-1] == {"prompt": "a", "max_tokens": 9}

    run(test)


def test_without_engines_the_error_says_to_try_again():
    async def test(client, prefill, decode):
        await decode[0].stop()
        await prefill[0].stop()
        response = await client.post("/v1/completions", json={"prompt": "a"})
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "no_engine"
        assert response.headers["retry-after"] == "1"
        assert (await client.get("/health")).status_code == 503

    run(test)


def test_a_stream_that_breaks_off_ends_with_an_error():
    async def test(client, prefill, decode):
        decode[0].part = b'data: {"x": 1}\n\n'
        response = await client.post("/v1/completions", json={"prompt": "a", "stream": True})
        first, error = [line for line in response.text.split("\n\n") if line][:2]
        assert first == 'data: {"x": 1}'
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "model_stopped"

    run(test)


def test_load_is_spread_over_the_engines():
    async def test(client, prefill, decode):
        for _ in range(6):
            await client.post("/v1/completions", json={"prompt": "a"})
        assert {len(engine.bodies) for engine in prefill} == {3}
        assert min(len(engine.bodies) for engine in decode) >= 2

    run(test, num_prefill=2, num_decode=2)


def test_other_paths_go_to_a_decode_engine():
    async def test(client, prefill, decode):
        assert (await client.get("/v1/models?x=1")).json() == {"from": "decode"}
        assert (await client.post("/tokenize", json={"prompt": "a"})).json() == {"from": "decode"}
        assert [path for path, _, _ in decode[0].requests] == ["/v1/models?x=1", "/tokenize"]
        assert prefill[0].requests == []

    run(test)


def test_invalid_bodies_are_answered_by_an_engine():
    async def test(client, prefill, decode):
        decode[0].answer = lambda path, body: (400, {"error": "of the engine"})
        headers = {"content-type": "application/json"}
        response = await client.post("/v1/completions", content="[1]", headers=headers)
        assert (response.status_code, response.json()) == (400, {"error": "of the engine"})
        assert prefill[0].requests == []
        response = await client.post("/v1/completions", content="{}", headers={"content-type": "text/csv"})
        assert response.status_code == 415

    run(test)


def test_health_and_metrics_are_the_routers():
    async def test(client, prefill, decode):
        for path in ("/health", "/health/ready", "/health/live"):
            assert (await client.get(path)).status_code == 200
        assert "mvllm:http_request" in (await client.get("/metrics")).text

    run(test)


@pytest.mark.parametrize("url", ["https://a", "http://a/path", "http://a:99999", "http://", "ftp://a", "http://a?x=1"])
def test_urls_of_engines_are_checked(url):
    with pytest.raises(ConfigError, match="URL"):
        RemoteServer(url)


def test_the_command_needs_both_kinds(capsys):
    with pytest.raises(SystemExit):
        main(["router", "--prefill", "http://a"])
    assert "--decode" in capsys.readouterr().err
    assert main(["router", "--prefill", "https://a", "--decode", "b"]) == 1
    assert "'https://a' must be the URL of a server" in capsys.readouterr().err


def test_an_engine_is_named_by_its_own_address_and_a_page_of_the_router_is_no_foreign_one():
    """Engines without keys refuse requests for other hosts, and of foreign pages, of which the router knows nothing."""

    async def test(client, prefill, decode):
        for origin, seen in (("https://router", None), ("http://page.example", "http://page.example")):
            await client.post("/v1/completions", json={"model": "m", "prompt": "a"}, headers={"Origin": origin})
            for engine in (*prefill, *decode):
                headers = engine.requests[-1][1]
                assert headers["host"] == engine.url.removeprefix("http://") and headers.get("origin") == seen

    run(test)

"""How a server begins and ends: what it says meanwhile, what becomes of requests, and with which status it goes."""

from __future__ import annotations

import json
import signal
import socket
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.helpers.processes import assert_nothing_left, shared_memory_names, wait_until
from tests.helpers.server import SMALL, ServerProcess, raw_post

LONG = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "temperature": 0}


def test_a_port_in_use_is_known_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with ServerProcess(tmp_path, "demo", "--port", str(port), *SMALL) as server:
            assert server.wait() == 1
        me = psutil.Process()
        assert f"Port {port} of 127.0.0.1 is taken by {me.name()} (pid {me.pid})" in server.log
        assert "Loading" not in server.log and "Traceback" not in server.log


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["demo", "--host", "no.such.host.invalid"], "no address to listen on"),
        ([], "Name one model"),
        (["demo", "--model", "demo"], "Name one model"),
        (["demo", "--api-key", ""], "is empty"),
        (["demo", "--chat-template", "/no/such/file"], "cannot be read"),
        (["/no/such/model"], "/no/such/model"),
        (["demo", "--skip-tokenizer-init"], "--skip-tokenizer-init"),
    ],
)
def test_what_cannot_be_served_is_explained_in_a_line(tmp_path: Path, arguments: list[str], says: str) -> None:
    with ServerProcess(tmp_path, *arguments, "--port", "0", *SMALL) as server:
        assert server.wait(120) in (1, 2)
    assert says in server.log and "Traceback" not in server.log


def test_while_the_model_is_loaded_it_lives_but_is_not_ready(tmp_path: Path) -> None:
    """And Ctrl-C ends it at once, with all that it has started."""
    before = shared_memory_names()
    with ServerProcess(tmp_path, "demo", "--port", "0", *SMALL) as server, server.client() as client:
        # The engine cannot begin while its process stands still, so what is seen here is the start.
        wait_until(lambda: len(server.pids()) > 1, 120, lambda: server.log)
        core = server.engine_core()
        core.suspend()
        assert client.get("/health/live").status_code == client.get("/health").status_code == 200
        ready = client.get("/health/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "the server is loading"})
        refused = client.post("/v1/completions", json=LONG)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "loading"
        assert client.get("/v1/models").json()["data"][0]["id"] == "demo"
        assert client.get("/load").json()["phase"] == "loading"
        server.signal(signal.SIGINT)
        assert server.wait() == 130
    assert "Traceback" not in server.log
    assert_nothing_left(server.tag, before)


def test_sigterm_lets_requests_finish_and_takes_no_new_ones(tmp_path: Path) -> None:
    before = shared_memory_names()
    arguments = ["demo", "--port", "0", "--shutdown-timeout", "120", *SMALL]
    with ServerProcess(tmp_path, *arguments) as server, server.client() as client:
        server.wait_ready()
        core = server.engine_core()
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            core.suspend()  # so that the request is under way for as long as we look
            server.signal(signal.SIGTERM)
            wait_until(lambda: client.get("/health/ready").status_code == 503, 60, lambda: server.log)
            assert client.get("/health/live").status_code == 200
            refused = client.post("/v1/completions", json=LONG)
            assert refused.status_code == 503 and refused.headers["retry-after"]
            assert refused.json()["error"]["code"] == "shutting_down"
            core.resume()
            chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0, server.log
    assert_nothing_left(server.tag, before)


def test_a_second_signal_aborts_what_is_under_way(tmp_path: Path) -> None:
    arguments = ["demo", "--port", "0", "--shutdown-timeout", "600", *SMALL]
    with ServerProcess(tmp_path, *arguments) as server, server.client() as client:
        server.wait_ready()
        core = server.engine_core()
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            core.suspend()
            server.signal(signal.SIGTERM)
            server.wait_for_log("SIGTERM: no new requests")
            server.signal(signal.SIGTERM)
            chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            core.resume()
        assert chunks[-1]["choices"][0]["finish_reason"] == "abort"
        assert server.wait() == 0, server.log


def test_when_the_engine_dies_requests_fail_and_the_status_says_so(tmp_path: Path) -> None:
    before = shared_memory_names()
    with ServerProcess(tmp_path, "demo", "--port", "0", *SMALL) as server, server.client() as client:
        server.wait_ready()
        core = server.engine_core()
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            core.suspend()  # else it may have finished before it is killed
            with socket.create_connection(server.address, timeout=60) as other:
                other.sendall(raw_post("/v1/completions", json.dumps(LONG).encode()))
                wait_until(lambda: client.get("/load").json()["server_load"] == 2, 60, "both are under way")
                core.kill()
                answer = b"".join(iter(lambda: other.recv(1 << 16), b""))
            rest = [line for line in lines if line]
        assert b" 500 " in answer.split(b"\r\n")[0] and b"engine_dead" in answer
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "engine_dead"
        assert rest[-1] == "data: [DONE]"
        assert server.wait() == 1
    assert "signal" in server.log and "EngineCore" in server.log
    assert_nothing_left(server.tag, before)


def test_a_full_queue_is_answered_with_429(tmp_path: Path) -> None:
    arguments = ["--max-num-seqs", "1", "--max-queued-requests", "1", "--uds", str(tmp_path / "socket"), *SMALL]
    with ServerProcess(tmp_path, "demo", *arguments) as server:
        server.wait_ready()
        transport = httpx.HTTPTransport(uds=str(tmp_path / "socket"))
        with httpx.Client(transport=transport, base_url="http://server", timeout=120) as client:
            core = server.engine_core()
            with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream:
                next(stream.iter_lines())
                core.suspend()
                with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}):
                    refused = client.post("/v1/completions", json=LONG)
                core.resume()
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "RateLimitError"
            short = {**LONG, "max_tokens": 2}
            deadline = time.monotonic() + 60
            while client.post("/v1/completions", json=short).status_code == 429 and time.monotonic() < deadline:
                time.sleep(0.05)
            assert client.post("/v1/completions", json=short).status_code == 200
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    assert not (tmp_path / "socket").exists()

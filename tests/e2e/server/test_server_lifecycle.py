"""Start and shutdown of a server: its logs, its requests, and its exit status."""

from __future__ import annotations

import json
import re
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import httpx2
import psutil
import pytest

from tests.helpers.processes import assert_nothing_left, shared_memory_names, stop_process, wait_until
from tests.helpers.server import SMALL, ServerProcess, raw_post

LONG = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "temperature": 0}


def test_a_port_in_use_is_reported_before_the_model_is_loaded(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with ServerProcess(tmp_path, "demo", "--port", str(port), *SMALL) as server:
            assert server.wait() == 1
        me = psutil.Process()
        assert f"Port {port} of 127.0.0.1 is in use by {me.name()} (pid {me.pid})" in server.log
        assert "Loading" not in server.log and "Traceback" not in server.log


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["demo", "--host", "no.such.host.invalid"], "no address to listen on"),
        ([], "No model is given"),
        (["demo", "--model", "another"], "two models are given"),
        (["demo", "--api-key", ""], "is empty"),
        (["demo", "--chat-template", "/no/such/file"], "cannot be read"),
        (["/no/such/model"], "/no/such/model"),
        (["demo", "--skip-tokenizer-init"], "--skip-tokenizer-init"),
    ],
)
def test_startup_errors_are_one_line(tmp_path: Path, arguments: list[str], says: str) -> None:
    with ServerProcess(tmp_path, *arguments, "--port", "0", *SMALL) as server:
        assert server.wait(120) in (1, 2)
    assert says in server.log and "Traceback" not in server.log


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_during_startup_shuts_the_server_down_cleanly(tmp_path: Path, number: int, status: int) -> None:
    """As soon as Python runs mvllm's first lines, and again once the socket file exists."""
    path = tmp_path / "socket"
    for moment in (handles_signals, lambda pid: path.exists()):
        with ServerProcess(tmp_path, "demo", "--uds", str(path), *SMALL) as server:
            wait_until(lambda: server.process.poll() is not None or moment(server.process.pid), 120, "not begun")  # noqa: B023
            server.signal(number)
            assert server.wait() == status, server.log
            assert "Traceback" not in server.log and not path.exists()
            assert_nothing_left(server.tag, shared_memory_names())


def handles_signals(pid: int) -> bool:
    """Whether a process has a handler for SIGTERM, according to the kernel."""
    caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def test_while_the_model_is_loaded_the_server_is_live_but_not_ready(tmp_path: Path) -> None:
    """Ctrl-C ends it at once, with all processes that it started."""
    before = shared_memory_names()
    with ServerProcess(tmp_path, "demo", "--port", "0", *SMALL) as server, server.client() as client:
        stop_process(server.engine_core().pid)  # it cannot start while its process is suspended
        assert client.get("/health/live").status_code == client.get("/ping").status_code == 200
        for path in ("/health/ready", "/health"):  # clients of other engines wait for the second
            answer = client.get(path)
            assert (answer.status_code, answer.json()) == (503, {"status": "the server is loading"})
        refused = client.post("/v1/completions", json=LONG)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "loading"
        assert client.get("/v1/models").json()["data"][0]["id"] == "demo"
        assert client.get("/load").json()["phase"] == "loading"
        server.signal(signal.SIGINT)
        assert server.wait() == 130
    assert "Traceback" not in server.log
    assert_nothing_left(server.tag, before)


def test_a_full_queue_is_429_and_sigterm_lets_requests_finish(tmp_path: Path) -> None:
    before = shared_memory_names()
    socket_path = tmp_path / "socket"
    arguments = ["--max-num-seqs", "1", "--max-queued-requests", "1", "--uds", str(socket_path), *SMALL]
    with ServerProcess(tmp_path, "demo", "--shutdown-timeout", "300", *arguments) as server:
        server.wait_ready()
        assert len(re.findall(r"Platform \w+, from mvllm-.*: .*\.\n", server.log)) == 1
        core = server.engine_core()
        transport = httpx2.HTTPTransport(uds=str(socket_path))
        with httpx2.Client(transport=transport, base_url="http://server", timeout=120) as client, ExitStack() as stack:
            stop_process(core.pid)  # so that the requests stay in flight
            ask = {**LONG, "stream": True}
            streams = [stack.enter_context(client.stream("POST", "/v1/completions", json=ask)) for _ in range(2)]
            refused = client.post("/v1/completions", json=LONG)
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "RateLimitError"
            server.signal(signal.SIGTERM)
            wait_until(lambda: client.get("/health/ready").status_code == 503, 60, lambda: server.log)
            assert client.get("/health/live").status_code == 200
            refused = client.post("/v1/completions", json=LONG)
            assert refused.status_code == 503 and refused.headers["retry-after"]
            assert refused.json()["error"]["code"] == "shutting_down"
            core.resume()
            for stream in streams:
                chunks = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
                assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0, server.log
    assert not socket_path.exists()
    assert_nothing_left(server.tag, before)


def test_a_hung_engine_is_unhealthy_and_a_second_signal_aborts_its_requests(tmp_path: Path) -> None:
    arguments = ["demo", "--port", "0", "--shutdown-timeout", "600", "--heartbeat-timeout", "1", *SMALL]
    with ServerProcess(tmp_path, *arguments) as server, server.client() as client:
        server.wait_ready()
        core = server.engine_core()
        stop_process(core.pid)
        assert client.get("/health/live").status_code == 200  # it is idle
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream:
            wait_until(lambda: client.get("/health/live").status_code == 503, 60, "it has, and does nothing")
            assert "no sign of life" in client.get("/health").json()["status"]
            assert client.get("/health/ready").status_code == 503
            server.signal(signal.SIGHUP)
            server.wait_for_log("SIGHUP: no new requests")
            server.signal(signal.SIGHUP)  # like a terminal that closes
            for _ in range(20):
                assert client.get("/health/ready").status_code == 503
            assert "Aborting" not in server.log
            server.signal(signal.SIGTERM)
            chunks = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
            core.resume()
        assert chunks[-1]["choices"][0]["finish_reason"] == "abort"
        assert server.wait() == 0, server.log


def test_when_the_engine_dies_requests_fail_and_the_exit_status_is_1(tmp_path: Path) -> None:
    before = shared_memory_names()
    with ServerProcess(tmp_path, "demo", "--port", "0", *SMALL) as server, server.client() as client:
        server.wait_ready()
        core = server.engine_core()
        stop_process(core.pid)  # otherwise it may finish before it is killed
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream:
            with socket.create_connection(server.address, timeout=120) as other:
                other.sendall(raw_post("/v1/completions", json.dumps(LONG).encode()))
                wait_until(lambda: client.get("/load").json()["server_load"] == 2, 60, "both are under way")
                core.kill()
                answer = b"".join(iter(lambda: other.recv(1 << 16), b""))
            rest = [line for line in stream.iter_lines() if line]
        assert b" 500 " in answer.split(b"\r\n")[0] and b"engine_dead" in answer
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "engine_dead"
        assert rest[-1] == "data: [DONE]"
        assert server.wait() == 1
    assert "signal" in server.log and "EngineCore" in server.log
    assert_nothing_left(server.tag, before)


def test_when_the_server_is_killed_no_process_is_left(tmp_path: Path) -> None:
    before = shared_memory_names()
    with ServerProcess(tmp_path, "demo", "--port", "0", *SMALL) as server:
        server.wait_ready()
        assert len(server.pids()) > 1
        server.process.kill()
        server.wait()
        assert_nothing_left(server.tag, before)

"""Two API servers on one socket, two replicas and the coordinator behave as one server."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx2
import psutil
import pytest

from tests.helpers.processes import assert_nothing_left, shared_memory_names, stop_process, wait_until, worker_processes
from tests.helpers.server import SMALL, ServerProcess, assert_idle, settled_pids, wait_idle

ADMIN = {"MVLLM_ADMIN_API_KEY": "boss"}
TWO_AND_TWO = ("--data-parallel-size", "2", "--api-server-count", "2")
LONG = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "temperature": 0, "stream": True}


def process(server: ServerProcess, name: str) -> psutil.Process:
    [found] = worker_processes(server.tag, name)
    return found


def clients_of_each(server: ServerProcess, stack: ExitStack, count: int = 2) -> list[httpx2.Client]:
    """One client per API server, with one connection to it: the other servers are suspended while it connects."""
    servers = [process(server, f"ApiServer_{index}") for index in range(count)]
    clients = []
    for one in servers:
        client = stack.enter_context(server.client(limits=httpx2.Limits(max_connections=1, keepalive_expiry=600)))
        for other in servers:
            if other != one:
                stop_process(other.pid)
        try:
            assert client.get("/version").status_code == 200
        finally:
            for other in servers:
                other.resume()
        clients.append(client)
    return clients


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The last test of this module ends the server by killing one of its processes."""
    folder = tmp_path_factory.mktemp("several")
    with ServerProcess(folder, "demo", "--port", "0", *TWO_AND_TWO, *SMALL, **ADMIN) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def both(server: ServerProcess) -> Iterator[list[httpx2.Client]]:
    with ExitStack() as stack:
        yield clients_of_each(server, stack)


def complete(client: httpx2.Client, prompt: str, **more: object) -> dict:
    answer = client.post("/v1/completions", json={"prompt": prompt, "temperature": 0, "max_tokens": 24, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def counter(client: httpx2.Client, name: str) -> float:
    found = [line for line in client.get("/metrics").text.splitlines() if line.startswith(name)]
    assert len(found) == 1, found
    return float(found[0].split()[-1])


def test_tokens_are_those_of_a_request_alone_on_each_server(server: ServerProcess, both: list[httpx2.Client]) -> None:
    before = settled_pids(server)
    prompts = [f"{index} little dogs went to the river and" for index in range(12)]
    alone = [complete(both[0], prompt)["choices"][0]["text"] for prompt in prompts]
    assert [complete(both[1], prompt)["choices"][0]["text"] for prompt in prompts[:3]] == alone[:3]
    cores = [process(server, f"EngineCore_DP{rank}") for rank in range(2)]
    busy = [sum(core.cpu_times()[:2]) for core in cores]
    ask = [(server, prompt) for prompt in prompts * 4]
    with ThreadPoolExecutor(16) as pool, server.client() as anybody:  # over many connections, to both servers
        together = list(pool.map(lambda each: complete(anybody, each[1])["choices"][0]["text"], ask))
    assert together == alone * 4
    assert all(sum(core.cpu_times()[:2]) > earlier for core, earlier in zip(cores, busy))
    wait_until(lambda: server.pids() == before, 120, "the same processes run")


def test_metrics_of_each_api_server_cover_all_of_them(both: list[httpx2.Client]) -> None:
    names = ("mvllm:generation_tokens_total", "mvllm:e2e_request_latency_seconds_count")
    completions = 'mvllm:http_requests_total{handler="/v1/completions",method="POST",status="2xx"}'
    complete(both[0], "One")
    for client in both:
        wait_idle(client)
    wait_until(lambda: [counter(both[0], name) for name in names] == [counter(both[1], name) for name in names], 60, "")
    before = {name: counter(both[0], name) for name in (*names, completions)}
    for index in range(5):
        complete(both[index % 2], f"{index} is a number", max_tokens=7, ignore_eos=True)
    for client in both:
        wait_until(lambda client=client: counter(client, names[1]) - before[names[1]] == 5, 60, lambda: str(before))
        wait_until(lambda client=client: counter(client, completions) - before[completions] == 5, 60, str(before))
        assert counter(client, names[0]) - before[names[0]] == 35
    blocks = [line for client in both for line in client.get("/metrics").text.splitlines() if "cache_config" in line]
    assert len(set(blocks)) == 3 and len(blocks) == 6  # the same, with its two comment lines


def test_running_requests_are_seen_by_both_servers_and_counted_once(
    server: ServerProcess, both: list[httpx2.Client]
) -> None:
    for client in both:
        wait_idle(client)
    with server.client() as third, third.stream("POST", "/v1/completions", json=LONG) as stream:
        lines = stream.iter_lines()  # the iterator must stay alive: closing it closes the stream
        next(lines)
        for client in both:
            seen: list[tuple[int, int]] = []

            def once(client: httpx2.Client = client, seen: list = seen) -> bool:
                load = client.get("/load").json()
                seen.append((load["server_load"], load["num_requests_running"]))
                return seen[-1] == (1, 1)

            wait_until(once, 60, lambda seen=seen: str(seen[-9:]))
            assert all(in_flight <= 1 and running <= 1 for in_flight, running in seen)
    for client in both:
        wait_idle(client)


def test_both_servers_may_have_requests_with_the_same_id(both: list[httpx2.Client]) -> None:
    prompts = ["A cat sat on", "The moon is a"]
    alone = [complete(both[0], prompt)["choices"][0]["text"] for prompt in prompts]

    def ask(index: int) -> str:
        answer = both[index].post(
            "/v1/completions",
            json={"prompt": prompts[index], "temperature": 0, "max_tokens": 24},
            headers={"X-Request-Id": "the-same"},
        )
        assert answer.headers["x-request-id"] == "the-same"
        return str(answer.json()["choices"][0]["text"])

    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            assert list(pool.map(ask, range(2))) == alone


def test_sleep_on_one_server_applies_to_both(both: list[httpx2.Client]) -> None:
    key = {"Authorization": "Bearer boss"}
    assert both[0].post("/sleep", headers=key).json() == {"is_sleeping": True}
    assert both[1].get("/is_sleeping", headers=key).json() == {"is_sleeping": True}
    assert both[1].get("/health/ready").status_code == 503
    assert both[1].post("/v1/completions", json={"prompt": "x"}).status_code == 503
    assert both[1].post("/wake_up", headers=key).json() == {"is_sleeping": False}
    assert both[0].get("/health/ready").status_code == 200
    assert complete(both[0], "x")["choices"]


def test_a_signal_to_the_process_group_reaches_only_the_parent(server: ServerProcess) -> None:
    """As Ctrl-C in a terminal does: the parent then stops the other processes in order."""
    children = server.pids() - {server.process.pid}
    assert len(children) == 5 and all(os.getpgid(pid) == pid for pid in children)
    assert os.getpgid(server.process.pid) == os.getpgid(0)


def test_other_users_can_reach_only_the_port(server: ServerProcess) -> None:
    """Of all sockets of all processes, one address listens on a network; the other sockets have no file system path."""
    listening, unix = set(), set()
    for pid in server.pids():
        for connection in psutil.Process(pid).net_connections("all"):
            if connection.family == socket.AF_UNIX:
                unix.add(connection.laddr)
            elif connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM:
                listening.add((connection.laddr.ip, connection.laddr.port))
    assert listening == {server.address}
    assert any(name.startswith("@mvllm-") for name in unix)  # abstract socket: the server checks the peer's credentials
    assert all(not name or name.startswith("@") for name in unix), unix


def test_an_idle_server_uses_less_than_one_percent_of_a_cpu(server: ServerProcess, both: list[httpx2.Client]) -> None:
    for client in both:
        wait_idle(client)
    assert_idle(server)


def test_the_death_of_the_coordinator_ends_the_server(server: ServerProcess, both: list[httpx2.Client]) -> None:
    """Must be the last test: it ends the server of this module."""
    for rank in range(2):
        stop_process(process(server, f"EngineCore_DP{rank}").pid)  # so that the request stays in flight
    before = shared_memory_names()
    with both[0].stream("POST", "/v1/completions", json=LONG) as stream:
        process(server, "DPCoordinator").kill()
        rest = [line for line in stream.iter_lines() if line.startswith("data: {")]
    error = json.loads(rest[-1].removeprefix("data: "))["error"]
    assert error["code"] == "engine_dead"
    assert server.wait() == 1
    assert "DPCoordinator" in server.log and "SIGKILL" in server.log
    assert_nothing_left(server.tag, before)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.exhaustive)])
def test_when_an_api_server_dies_or_hangs_the_others_finish_their_requests(tmp_path: Path, number: int) -> None:
    """The requests of the dead or hung server are aborted, so that nothing computes for them. The server exits with
    status 1."""
    before = shared_memory_names()
    arguments = ("--port", "0", "--api-server-count", "2", "--shutdown-timeout", "300", "--api-server-timeout", "8")
    with ServerProcess(tmp_path, "demo", *arguments, *SMALL) as server, ExitStack() as stack:
        clients = clients_of_each(server.wait_ready(), stack)
        core = server.engine_core()
        stop_process(core.pid)  # so that both requests stay in flight
        asks = [{**LONG, "max_tokens": 40}, LONG]
        streams = [
            stack.enter_context(client.stream("POST", "/v1/completions", json=ask))
            for client, ask in zip(clients, asks)
        ]
        process(server, "ApiServer_1").send_signal(number)
        server.wait_for_log("The other API servers finish their requests")
        core.resume()
        chunks = [json.loads(line[6:]) for line in streams[0].iter_lines() if line.startswith("data: {")]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        with pytest.raises(httpx2.HTTPError):
            list(streams[1].iter_lines())
        assert server.wait() == 1
    said = "no sign of life within 8 s" if number == signal.SIGSTOP else "SIGKILL"
    assert "ApiServer_1" in server.log and said in server.log and "Traceback" not in server.log
    assert_nothing_left(server.tag, before)


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", ["EngineCore_DP0", "EngineCore_DP1", "ApiServer_0", "the parent", "DPCoordinator"])
def test_the_death_or_hang_of_each_process_ends_the_server(tmp_path: Path, victim: str) -> None:
    before = shared_memory_names()
    arguments = ("--port", "0", *TWO_AND_TWO, "--api-server-timeout", "8", *SMALL)
    with ServerProcess(tmp_path, "demo", *arguments) as server:
        server.wait_ready()
        with server.client() as client:
            complete(client, "Once upon")
        if victim == "the parent":
            server.process.kill()
        elif victim == "DPCoordinator":  # its death is tested by test_the_death_of_the_coordinator_ends_the_server
            stop_process(process(server, victim).pid)
        else:
            process(server, victim).kill()
        assert server.wait() == (-signal.SIGKILL if victim == "the parent" else 1)
        assert victim == "the parent" or victim in server.log
        assert_nothing_left(server.tag, before)


@pytest.mark.exhaustive
def test_after_sigterm_all_requests_finish(tmp_path: Path) -> None:
    before = shared_memory_names()
    path = tmp_path / "socket"
    arguments = ("--uds", str(path), *TWO_AND_TWO, "--shutdown-timeout", "300", *SMALL)
    with ServerProcess(tmp_path, "demo", *arguments) as server, ExitStack() as stack:
        server.wait_ready()
        transport = httpx2.HTTPTransport(uds=str(path))
        client = stack.enter_context(httpx2.Client(transport=transport, base_url="http://server", timeout=120))
        cores = [process(server, f"EngineCore_DP{rank}") for rank in range(2)]
        for core in cores:
            stop_process(core.pid)
        streams = [stack.enter_context(client.stream("POST", "/v1/completions", json=LONG)) for _ in range(4)]
        server.signal(signal.SIGTERM)
        wait_until(lambda: server.log.count("SIGTERM: no new requests") == 3, 60, lambda: server.log)
        refused = client.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        for core in cores:
            core.resume()
        for stream in streams:
            chunks = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
            assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0, server.log
    assert not path.exists()
    assert_nothing_left(server.tag, before)


@pytest.mark.exhaustive
def test_a_hung_core_is_ended_by_its_parent_with_its_stacks(tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path, "demo", "--port", "0", *TWO_AND_TWO, "--step-timeout", "1", *SMALL) as server,
        server.client() as client,
    ):
        server.wait_ready()
        for rank in range(2):
            stop_process(process(server, f"EngineCore_DP{rank}").pid)
        answer = client.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 500 and answer.json()["error"]["code"] == "engine_dead"
        assert server.wait() == 1
        assert "has given no sign of life" in server.log


def test_startup_errors_are_those_of_a_single_server(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with ServerProcess(tmp_path, "demo", "--port", port, "--api-server-count", "2", *SMALL) as server:
            assert server.wait() == 1
        assert "is in use by" in server.log and "Traceback" not in server.log
    with ServerProcess(tmp_path, "demo", "--port", "0", "--api-server-count", "0", *SMALL) as server:
        assert server.wait() == 1
    assert "--api-server-count is 0" in server.log


@pytest.mark.exhaustive
def test_all_servers_use_the_length_that_the_engine_core_has_chosen(tmp_path: Path) -> None:
    auto = ("--max-model-len", "auto", "--kv-cache-memory-bytes", "600000")
    with (
        ServerProcess(tmp_path, "demo", "--port", "0", "--api-server-count", "2", *auto) as server,
        ExitStack() as stack,
    ):
        server.wait_ready()
        lengths = set()
        for client in clients_of_each(server, stack):
            [length] = {card["max_model_len"] for card in client.get("/v1/models").json()["data"]}
            lengths.add(length)
            assert client.post("/tokenize", json={"prompt": "Once"}).json()["max_model_len"] == length
            long = client.post("/v1/completions", json={"prompt": [5] * length, "max_tokens": 1})
            assert long.status_code == 400 and f"{length} (max_model_len)" in long.text
            whole = client.post("/v1/completions", json={"prompt": [5] * (length - 2), "ignore_eos": True})
            assert whole.json()["usage"]["total_tokens"] <= length
        assert len(lengths) == 1 and 1 < length < 1024, lengths
    assert f"max_model_len auto: {length} of the model's 1,024 tokens fit" in server.log

"""Connections between the router and a model server, and the metrics of several of them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mvllm.extension_api.http_connection import ConnectionLostError
from mvllm_router.connection_passing import ConnectionListener, ConnectionSender, connection_socket_pair
from mvllm_router.merged_metrics import merge_metrics
from mvllm_router.model_client import ModelClient


class FakeModelServer:
    """Accepts connections as a model server does. The test answers by hand."""

    def __init__(self) -> None:
        ours, theirs = connection_socket_pair()
        self.listener = ConnectionListener(theirs.detach())
        self.client = ModelClient(ConnectionSender(ours), "key")

    async def accept(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        end, _ = self.listener.accept()
        return await asyncio.open_unix_connection(sock=end)


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[FakeModelServer]:
    server = FakeModelServer()
    yield server
    server.client.close()
    server.listener.close()


def run(test: Callable[[FakeModelServer], Awaitable[None]]) -> None:
    async def with_server() -> None:
        async with running() as server:
            await test(server)

    asyncio.run(asyncio.wait_for(with_server(), 120))


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_a_connection_is_used_again_after_a_whole_response_and_closed_after_a_part() -> None:
    async def test(server: FakeModelServer) -> None:
        async with server.client.connection() as first:
            first.send(b"GET /a HTTP/1.1\r\n\r\n", b"")
            reader, writer = await server.accept()
            assert await reader.readuntil(b"\r\n\r\n") == b"GET /a HTTP/1.1\r\n\r\n"
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"3\r\nabc\r\n0\r\n\r\n")
            status, headers = await first.read_head()
            assert status == 200 and (b"content-type", b"text/plain") in headers
            assert b"".join([part async for part in first.read_body()]) == b"abc"
        async with server.client.connection() as second:
            assert second is first
            second.send(b"POST /b HTTP/1.1\r\n\r\n", b"body")
            assert await reader.readuntil(b"body") == b"POST /b HTTP/1.1\r\n\r\nbody"
            writer.write(HEAD + b"3\r\nabc\r\n")
            assert (await second.read_head())[0] == 200
        assert await reader.read() == b""  # the rest was not wanted
        async with server.client.connection() as third:
            assert third is not first
        writer.close()

    run(test)


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("/metrics", b"/metrics"),
        (
            "/v1/responses/a HTTP/1.1\r\nX-A: b\r\n\r\nGET /b",
            b"/v1/responses/a%20HTTP/1.1%0D%0AX-A:%20b%0D%0A%0D%0AGET%20/b",
        ),
        ("/v1/responses/a\0b?c#d%0d\u2028", b"/v1/responses/a%00b%3Fc%23d%250d%E2%80%A8"),
    ],
)
def test_a_path_of_a_client_is_one_path_in_a_request_of_the_router(path: str, sent: bytes) -> None:
    async def test(server: FakeModelServer) -> None:
        credentials = [(b"authorization", b"Bearer user"), (b"x-other", b"1")]
        for given, key in ((None, b"Bearer key"), (credentials, b"Bearer user"), ([], None)):
            asked = asyncio.create_task(server.client.fetch(path, headers=given))
            await asyncio.sleep(0)
            while True:
                try:
                    reader, writer = await server.accept()
                    break
                except BlockingIOError:
                    await asyncio.sleep(0.001)
            first, *headers = (await reader.readuntil(b"\r\n\r\n")).removesuffix(b"\r\n\r\n").split(b"\r\n")
            assert first == b"GET " + sent + b" HTTP/1.1"
            assert headers == [b"host: router", *([] if key is None else [b"authorization: " + key])]
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
            assert await asked == b"ok"
            writer.close()

    run(test)


def test_a_model_server_waits_for_a_reader_that_does_not_read() -> None:
    async def test(server: FakeModelServer) -> None:
        async with server.client.connection() as connection:
            connection.send(b"GET / HTTP/1.1\r\n\r\n", b"")
            _, writer = await server.accept()
            writer.write(HEAD)
            chunk = b"10000\r\n" + bytes(1 << 16) + b"\r\n"
            sent = 0
            with contextlib.suppress(TimeoutError):
                while sent < 1 << 26:
                    writer.write(chunk)
                    sent += 1 << 16
                    await asyncio.wait_for(writer.drain(), 0.2)
            assert sent < 1 << 23  # 8 MiB: what the router and the kernel hold
            writer.write(b"0\r\n\r\n")
            await connection.read_head()
            assert sum([len(part) async for part in connection.read_body()]) == sent
            writer.close()

    run(test)


@pytest.mark.parametrize("answer", [b"", HEAD[:20], b"no HTTP at all\r\n\r\n"])
def test_the_end_of_a_model_server_is_noticed(answer: bytes) -> None:
    async def test(server: FakeModelServer) -> None:
        with pytest.raises(ConnectionLostError):
            async with server.client.connection() as connection:
                connection.send(b"GET / HTTP/1.1\r\n\r\n", b"")
                _, writer = await server.accept()
                writer.write(answer)
                writer.close()
                await connection.read_head()
        server.listener.close()
        with pytest.raises(ConnectionLostError):
            async with server.client.connection():
                pass
        assert await server.client.fetch("/") is None

    run(test)


def test_connections_that_are_not_accepted_are_closed_with_the_listener() -> None:
    ours, theirs = connection_socket_pair()
    sender, listener = ConnectionSender(ours), ConnectionListener(theirs.detach())
    end = sender.connect()
    listener.close()
    gc.collect()
    end.settimeout(120)
    assert end.recv(1) == b""
    end.close()
    sender.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        sender.connect()


def test_a_message_without_a_descriptor_is_no_connection() -> None:
    ours, theirs = connection_socket_pair()
    with ours, ConnectionListener(theirs.detach()) as listener:
        ours.send(b"c")
        with pytest.raises(ConnectionAbortedError):
            listener.accept()
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_metrics_of_several_servers_are_one_page() -> None:
    page = (
        "# HELP mvllm:tokens_total Tokens.\n# TYPE mvllm:tokens_total counter\n"
        'mvllm:tokens_total{{model_name="{0}"}} {1}\n'
        "# HELP mvllm:load Now.\n# TYPE mvllm:load gauge\nmvllm:load {1}\n"
        '# HELP mvllm:time Seconds.\n# TYPE mvllm:time histogram\nmvllm:time_bucket{{le="1.0"}} {1}\n'
        "mvllm:time_count 1\nmvllm:time_sum 1\n"
        "# HELP mvllm:http_requests_total Answers.\n# TYPE mvllm:http_requests_total counter\n"
        'mvllm:http_requests_total{{a="b"}} 9\n'
    )
    own = "# HELP mvllm:http_requests_total Answers.\n# TYPE mvllm:http_requests_total counter\n"
    own += 'mvllm:http_requests_total{a="b"} 1\n'
    merged = merge_metrics(own, [("a", page.format("a", 1)), ('"b\\', page.format("x", 2))])
    assert merged.count("# TYPE mvllm:tokens_total") == merged.count("# HELP mvllm:tokens_total") == 1
    families = {each.name: each.samples for each in text_string_to_metric_families(merged)}
    assert [each.labels["model_name"] for each in families["mvllm:tokens"]] == ["a", "x"]
    assert [(each.labels["model_name"], each.value) for each in families["mvllm:load"]] == [("a", 1.0), ('"b\\', 2.0)]
    assert {each.labels["model_name"] for each in families["mvllm:time"]} == {"a", '"b\\'}
    assert [each.value for each in families["mvllm:http_requests"]] == [1.0]


def test_a_socket_pair_has_no_name() -> None:
    ours, theirs = connection_socket_pair()
    with ours, theirs:
        assert ours.family == socket.AF_UNIX and ours.getsockname() in ("", b"", None)

"""HTTP on one connection, and the limits on all connections of a process; the test controls the responses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
import uvicorn
import uvloop
from starlette.responses import Response

from mvllm.entrypoints.openai.common.streaming_response import (
    ClientDisconnected,
    EventStreamResponse,
    cancel_on_disconnect,
)
from mvllm.entrypoints.openai.server import connections
from mvllm.entrypoints.openai.server.connections import ConnectionTable
from mvllm.entrypoints.openai.server.http_protocol import MAX_PIPELINED_REQUESTS, LimitedHttpProtocol, uvicorn_settings

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
PROBE = GET.replace(b"GET /", b"GET /health/live")


class App:
    """Answers `/now`, `/large` and probes at once, `/stream` with events, other paths when `answers` is set."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.begun = 0
        self.left = asyncio.Semaphore(0)  # released for each client that has disconnected

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.begun += 1
        try:
            if scope["path"] == "/stream":
                await EventStreamResponse(self.events(), 60.0, self.left.release)(scope, receive, send)
                return
            async with cancel_on_disconnect(receive):
                if scope["path"] not in ("/now", "/health/live", "/large"):
                    await self.answers.wait()
        except ClientDisconnected:
            self.left.release()
            return
        if scope["path"] == "/large":
            await Response(b"x" * (32 << 20), headers={"connection": "close"})(scope, receive, send)
        else:
            await Response(scope["path"])(scope, receive, send)

    async def events(self) -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        await self.answers.wait()
        yield b"data: 2\n\n"


class Listener:
    """A listening server in this process."""

    def __init__(self, app: App, table: ConnectionTable) -> None:
        self.app, self.table = app, table
        self.address: tuple[str, int] = ("", 0)
        self._config = uvicorn.Config(app, **uvicorn_settings())
        self._protocols: list[LimitedHttpProtocol] = []

    def make_protocol(self) -> LimitedHttpProtocol:
        self._protocols.append(LimitedHttpProtocol(self._config, self.table, {}))
        return self._protocols[-1]

    async def connect(self, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A client's connection, after the server has accepted it."""
        before = len(self._protocols)
        reader, writer = await asyncio.open_connection(*self.address)
        writer.write(data)
        while len(self._protocols) == before or self._protocols[-1].transport is None:
            await asyncio.sleep(0)
        return reader, writer


def with_listener(
    test: Callable[[Listener], Coroutine[Any, Any, None]], *, most: int = 100, num_for_probes: int = 2
) -> None:
    async def run() -> None:
        listener = Listener(App(), ConnectionTable(most, num_for_probes))
        server = await asyncio.get_running_loop().create_server(listener.make_protocol, "127.0.0.1", 0)
        listener.address = server.sockets[0].getsockname()
        try:
            await test(listener)
        finally:
            listener.app.answers.set()
            server.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(run(), 120))


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body of the next answer that is not an interim one."""
    while True:
        head = await reader.readuntil(b"\r\n\r\n")
        if int(head.split()[1]) != 100:
            break
    [length] = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return int(head.split()[1]), await reader.readexactly(int(length.split(b":")[1]))


async def read_until_closed(reader: asyncio.StreamReader) -> bytes:
    """The received bytes until the connection is closed or reset."""
    with contextlib.suppress(ConnectionError):
        return await reader.read()
    return b""


class TestPipelines:
    def test_the_maximum_of_pipelined_requests_is_answered_in_order_repeatedly(self) -> None:
        async def test(listener: Listener) -> None:
            reader, writer = await listener.connect()
            for _ in range(5):
                writer.write(
                    b"".join(GET.replace(b"/ ", b"/%d " % index, 1) for index in range(MAX_PIPELINED_REQUESTS))
                )
                listener.app.answers.set()
                answers = [await read_answer(reader) for _ in range(MAX_PIPELINED_REQUESTS)]
                assert answers == [(200, b"/%d" % index) for index in range(MAX_PIPELINED_REQUESTS)]

        with_listener(test)

    def test_one_request_too_many_closes_the_connection_and_aborts_all(self) -> None:
        async def test(listener: Listener) -> None:
            reader, _ = await listener.connect(GET * 60_000)
            assert await read_until_closed(reader) == b""
            await listener.app.left.acquire()
            assert listener.app.begun == 1 and len(listener.table) == 0
            reader, _ = await listener.connect(PROBE)
            assert (await read_answer(reader))[0] == 200

        with_listener(test)

    def test_a_disconnect_is_noticed_with_requests_that_came_one_by_one(self) -> None:
        async def test(listener: Listener) -> None:
            _, writer = await listener.connect(GET)
            for _ in range(3):
                while listener.app.begun == 0:
                    await asyncio.sleep(0)
                writer.write(GET)
                await asyncio.sleep(0.02)
            writer.close()
            await listener.app.left.acquire()

        with_listener(test)


class TestClientsThatCloseTheirSendingSide:
    def test_receive_their_responses(self) -> None:
        async def test(listener: Listener) -> None:
            reader, writer = await listener.connect(GET + GET.replace(b"/", b"/second", 1))
            writer.write_eof()
            asyncio.get_running_loop().call_later(0.3, listener.app.answers.set)
            assert [await read_answer(reader) for _ in range(2)] == [(200, b"/"), (200, b"/second")]
            assert await read_until_closed(reader) == b""

        with_listener(test)

    def test_receive_the_rest_of_their_stream(self) -> None:
        async def test(listener: Listener) -> None:
            reader, writer = await listener.connect(GET.replace(b"/", b"/stream", 1))
            await reader.readuntil(b"data: 1\n\n\r\n")
            writer.write_eof()
            asyncio.get_running_loop().call_later(0.3, listener.app.answers.set)
            rest = await read_until_closed(reader)
            assert rest.endswith(b"9\r\ndata: 2\n\n\r\n0\r\n\r\n")
            assert rest.startswith(b"3\r\n:\n\n\r\n")

        with_listener(test)

    @pytest.mark.parametrize("request_", [GET, GET.replace(b"/", b"/stream", 1), GET.replace(b"1.1", b"1.0")])
    def test_are_distinguished_from_disconnected_ones(self, request_: bytes) -> None:
        async def test(listener: Listener) -> None:
            reader, writer = await listener.connect(request_)
            while not listener.app.begun:
                await asyncio.sleep(0.01)
            if b"stream" in request_:
                await reader.readuntil(b"data: 1\n\n\r\n")
            writer.close()
            await listener.app.left.acquire()
            assert not listener.app.answers.is_set()

        with_listener(test)

    def test_end_an_incomplete_body(self) -> None:
        async def test(listener: Listener) -> None:
            half = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n12345"
            reader, writer = await listener.connect(GET.replace(b"/", b"/now", 1) + half)
            writer.write_eof()
            assert (await read_answer(reader)) == (200, b"/now")
            assert await read_until_closed(reader) == b""

        with_listener(test)


class TestLimits:
    """At most three connections, and two more for probes."""

    def test_a_new_connection_evicts_the_oldest_that_waits_for_its_client(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(connections, "REQUEST_HEAD_GRACE_SECONDS", 0.0)

        async def test(listener: Listener) -> None:
            idle = await listener.connect(GET.replace(b"/", b"/now", 1))
            await read_answer(idle[0])
            heads = [await listener.connect(b"GET / HT") for _ in range(2)]
            fourth = await listener.connect(PROBE)
            assert (await read_answer(fourth[0]))[0] == 200
            assert await read_until_closed(heads[0][0]) == b""
            heads[1][1].write(b"TP/1.1\r\nHost: x\r\n\r\n")  # it no longer waits for its client
            while listener.app.begun < 3:
                await asyncio.sleep(0.01)
            fifth = await listener.connect(PROBE)  # now the idle connection is the older of two
            assert (await read_answer(fifth[0]))[0] == 200
            assert await read_until_closed(idle[0]) == b""
            listener.app.answers.set()
            assert await read_answer(heads[1][0]) == (200, b"/")

        with_listener(test, most=3)

    def test_while_all_are_busy_only_probes_are_answered(self, caplog: pytest.LogCaptureFixture) -> None:
        async def test(listener: Listener) -> None:
            busy = [await listener.connect(GET) for _ in range(3)]
            while listener.app.begun < 3:
                await asyncio.sleep(0.01)
            half_sent = [await listener.connect(b"GET / HT") for _ in range(20)]
            for _ in range(3):
                reader, _ = await listener.connect(GET.replace(b"GET", b"DELETE"))
                status, body = await read_answer(reader)
                assert status == 503 and json.loads(body)["error"]["type"] == "ServiceUnavailableError"
                reader, _ = await listener.connect(PROBE)
                assert await read_answer(reader) == (200, b"/health/live")
                assert await read_until_closed(reader) == b""
            assert listener.app.begun == 6
            for reader, _ in half_sent[:-2]:
                assert await read_until_closed(reader) == b""
            listener.app.answers.set()
            for reader, _ in busy:
                assert await read_answer(reader) == (200, b"/")

        with caplog.at_level(logging.WARNING, "mvllm"):
            with_listener(test, most=3)
        assert len([record for record in caplog.records if "All 3 connections are in use" in record.message]) == 1

    def test_an_incomplete_head_after_a_long_response_has_a_time_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mvllm.entrypoints.openai.server.http_protocol.HEAD_SECONDS", 0.05)

        async def test(listener: Listener) -> None:
            reader, _ = await listener.connect(GET + b"GET / HT")
            await asyncio.sleep(0.2)
            listener.app.answers.set()
            assert await read_answer(reader) == (200, b"/")
            assert await read_until_closed(reader) == b""

        with_listener(test)

    def test_a_body_whose_response_was_sent_has_a_time_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mvllm.entrypoints.openai.server.http_protocol.HEAD_SECONDS", 0.1)

        async def test(listener: Listener) -> None:
            post = b"POST /now HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n1"
            reader, writer = await listener.connect(post)
            assert await read_answer(reader) == (200, b"/now")
            with contextlib.suppress(ConnectionError):
                while not (reader.at_eof() or writer.is_closing()):
                    writer.write(b"1")
                    await asyncio.sleep(0.01)

        with_listener(test)

    def test_a_closing_connection_whose_client_reads_nothing_is_aborted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mvllm.entrypoints.openai.server.http_protocol.STALL_SECONDS", 0.05)

        async def test(listener: Listener) -> None:
            with socket.create_connection(listener.address) as client:
                client.sendall(GET.replace(b"/", b"/large", 1))
                while not len(listener.table):
                    await asyncio.sleep(0.01)
                while len(listener.table):
                    await asyncio.sleep(0.01)

        with_listener(test)

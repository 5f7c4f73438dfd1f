"""The connections of load generators and routers, against a scripted server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest

from mvllm.http_connection import ConnectionLostError, ConnectionPool, HTTPConnection

T = TypeVar("T")
REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n"
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc"


@asynccontextmanager
async def serving(*answers: bytes, closes: bool = False) -> AsyncIterator[Callable[[], Awaitable[HTTPConnection]]]:
    """A server that answers the requests of each connection in turn; gives what connects to it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            if not await reader.read(len(REQUEST)):
                break
            writer.write(answer)
        if closes:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()

    async def connect() -> HTTPConnection:
        _, connection = await asyncio.get_running_loop().create_connection(HTTPConnection, host, port)
        return connection

    try:
        yield connect
    finally:
        server.close()


async def body_of(connection: HTTPConnection) -> bytes:
    await connection.read_head()
    return b"".join([part async for part in connection.read_body()])


def test_a_connection_is_used_again_if_its_response_has_been_read() -> None:
    async def run() -> None:
        async with serving(WHOLE, CHUNKED + b"0\r\n\r\n", WHOLE) as connect:
            used = []

            async def connect_and_note() -> HTTPConnection:
                used.append(await connect())
                return used[-1]

            pool = ConnectionPool(connect_and_note, 10.0)
            for _ in range(2):
                async with pool.connection() as connection:
                    connection.send(REQUEST)
                    assert await body_of(connection) == b"abc"
            async with pool.connection() as connection:  # is closed: its response has not been read
                connection.send(REQUEST)
            async with pool.connection() as connection:
                connection.send(REQUEST)
                assert await body_of(connection) == b"abc"
            assert len(used) == 2
            pool.close()

    asyncio.run(run())


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    async def run() -> None:
        async with serving(b"HTTP/1.1 200 OK\r\n\r\nabc", closes=True) as connect:
            connection = await connect()
            connection.send(REQUEST)
            assert await body_of(connection) == b"abc" and not connection.is_reusable

    asyncio.run(run())


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "before the response"),
        (CHUNKED, "in the middle of the response"),
        (WHOLE[:-1], "in the middle of the response"),
        (b"nonsense\r\n\r\n", "not valid HTTP"),
    ],
)
def test_a_response_that_is_incomplete_is_an_error(answer: bytes, why: str) -> None:
    async def run() -> None:
        async with serving(answer, closes=True) as connect:
            connection = await connect()
            connection.send(REQUEST)
            with pytest.raises(ConnectionLostError, match=why):
                await body_of(connection)

    asyncio.run(run())


def test_a_function_receives_the_body_as_it_arrives_and_what_it_raises_is_raised() -> None:
    async def run() -> None:
        async with serving(CHUNKED + b"0\r\n\r\n", WHOLE) as connect:
            connection = await connect()
            received: list[bytes] = []
            connection.send(REQUEST, on_body=received.append)
            assert await body_of(connection) == b"" and received == [b"abc"] and connection.is_reusable

            def fail(data: bytes) -> None:
                raise ValueError(data.decode())

            connection.send(REQUEST, on_body=fail)
            with pytest.raises(ValueError, match="abc"):  # although the response is complete
                await body_of(connection)
            assert not connection.is_reusable

    asyncio.run(run())

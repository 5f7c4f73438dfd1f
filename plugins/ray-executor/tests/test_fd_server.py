"""FileDescriptorServer: descriptors arrive, the token is required, and each end notices the end of the other."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import msgspec
import pytest

from mvllm_ray import fd_server
from mvllm_ray.fd_server import (
    FileDescriptorServer,
    FileDescriptorServerAddress,
    MessageWithFds,
    fetch_descriptors,
)


class Files(msgspec.Struct, frozen=True):
    first: int
    second: int


@pytest.fixture
def pipes() -> Iterator[list[tuple[int, int]]]:
    made = [os.pipe(), os.pipe()]
    yield made
    for pair in made:
        for fd in pair:
            os.close(fd)


@pytest.fixture
def server(pipes: list[tuple[int, int]]) -> Iterator[FileDescriptorServer]:
    fds = (pipes[0][1], pipes[1][1])
    server = FileDescriptorServer(
        {0: MessageWithFds(Files(*fds), fds), 7: MessageWithFds(Files(*reversed(fds)), tuple(reversed(fds)))}
    )
    yield server
    server.close()


def test_each_descriptor_is_mapped_from_its_number_in_the_message(
    server: FileDescriptorServer, pipes: list[tuple[int, int]]
) -> None:
    for key, order in ((0, (0, 1)), (7, (1, 0))):
        files, fds, control = fetch_descriptors(server.address, key, Files)
        assert not {files.first, files.second} & set(fds.values())
        os.write(fds[files.first], b"first")
        os.write(fds[files.second], b"second")
        assert os.read(pipes[order[0]][0], 99) == b"first"
        assert os.read(pipes[order[1]][0], 99) == b"second"
        assert not any(os.get_inheritable(fd) for fd in fds.values())
        for fd in fds.values():
            os.close(fd)
        control.close()


def test_the_connection_outlives_the_server_and_signals_the_end_of_either_side(server: FileDescriptorServer) -> None:
    _, fds, control = fetch_descriptors(server.address, 0, Files)
    for fd in fds.values():
        os.close(fd)
    theirs = server.connection(0)
    server.close()
    assert theirs.pid in (os.getpid(), None)
    assert not select.select([control, theirs.socket], [], [], 0)[0]
    theirs.socket.close()
    assert select.select([control], [], [], 5)[0]
    assert control.recv(1) == b""
    control.close()


@pytest.mark.parametrize("token", [b"", b"x" * 32, b"x" * 31])
def test_a_client_without_the_token_gets_nothing_and_others_are_served(
    server: FileDescriptorServer, token: bytes
) -> None:
    with pytest.raises((EOFError, OSError)):
        fetch_descriptors(FileDescriptorServerAddress(server.address.path, token), 0, Files)
    _, fds, control = fetch_descriptors(server.address, 0, Files)
    for fd in fds.values():
        os.close(fd)
    control.close()


def test_a_message_is_sent_once(server: FileDescriptorServer) -> None:
    _, fds, control = fetch_descriptors(server.address, 0, Files)
    for fd in fds.values():
        os.close(fd)
    with pytest.raises((EOFError, OSError)):
        fetch_descriptors(server.address, 0, Files)
    control.close()


def test_a_client_that_announces_a_long_message_is_disconnected(server: FileDescriptorServer) -> None:
    path = server.address.path
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(120)
        client.connect(f"\0{path[1:]}" if path.startswith("@") else path)
        client.sendall(b"\xff\xff\xff\x7f")
        assert client.recv(1) == b""


@pytest.mark.parametrize("said", [b"", b"\x24", b"\x24\0\0\0half of a token"], ids=["nothing", "half a length", "half"])
def test_idle_connections_do_not_block_other_clients(
    server: FileDescriptorServer, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fd_server, "_CONNECTION_TIMEOUT_SECONDS", 120.0)  # no idle client is disconnected meanwhile
    path = server.address.path
    with ExitStack() as stack:
        for _ in range(80):
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.connect(f"\0{path[1:]}" if path.startswith("@") else path)
            client.sendall(said)
        _, fds, control = fetch_descriptors(server.address, 0, Files)
        for fd in fds.values():
            os.close(fd)
        control.close()
        before = time.monotonic()
        server.close()
        assert time.monotonic() - before < 60, "close waited for idle clients"


def test_a_request_may_arrive_byte_by_byte(server: FileDescriptorServer) -> None:
    path = server.address.path
    with socket.socket(socket.AF_UNIX) as slow:
        slow.settimeout(120)
        slow.connect(f"\0{path[1:]}" if path.startswith("@") else path)
        for byte in b"\x24\0\0\0" + server.address.token + b"\x07\0\0\0":
            slow.send(bytes([byte]))
            time.sleep(0.001)
        begin, fds, _, _ = socket.recv_fds(slow, 1, 10)
        assert begin == b"\0"
        assert len(fds) == 2
        for fd in fds:
            os.close(fd)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the name is a path")
def test_a_client_waits_while_the_backlog_is_full() -> None:
    with socket.socket(socket.AF_UNIX) as listener, ExitStack() as stack, ThreadPoolExecutor() as pool:
        listener.bind("\0mvllm-test-" + secrets.token_hex(8))
        listener.listen(0)
        address = FileDescriptorServerAddress("@" + listener.getsockname()[1:].decode(), b"x" * 32)
        for _ in range(3):  # until the backlog is full
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                client.connect(listener.getsockname())
        late = pool.submit(fetch_descriptors, address, 0, Files)
        with pytest.raises(TimeoutError):
            late.result(0.3)
        requests = []
        while b"x" * 32 not in b"".join(requests):
            peer, _ = listener.accept()
            with peer:
                peer.settimeout(0.5)
                with contextlib.suppress(TimeoutError):
                    requests.append(peer.recv(100))
        with pytest.raises((EOFError, OSError)):
            late.result(120)

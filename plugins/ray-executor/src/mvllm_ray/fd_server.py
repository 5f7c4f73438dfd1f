"""Passes file descriptors to processes of this machine that are not child processes, if they present a token.

    engine    server = FileDescriptorServer({0: MessageWithFds(message, fds), ...})   send server.address to the worker
    worker    message, fds, connection = fetch_descriptors(address, 0, kind)          has its own descriptors now
    engine    connection = server.connection(0)                                       the socket to that worker

The socket stays open: the kernel closes it at the end of either process, which the other process notices.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import shutil
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from mvllm.extension_api import get_logger
from mvllm.extension_api.remote_executors import LENGTH, encode_frame, read_frame

logger = get_logger(__name__)

T = TypeVar("T")

_TOKEN_BYTES = 32
_KEY = struct.Struct("=I")
_REQUEST_BYTES = _TOKEN_BYTES + _KEY.size
_CREDENTIALS = struct.Struct("=iII")  # Linux' struct ucred: pid, uid, gid
_POLL_SECONDS = 0.2
_CONNECTION_TIMEOUT_SECONDS = 10.0
_REFUSED_MESSAGE = "its token is wrong, or there is no message for its key"
_MAX_PENDING_CONNECTIONS = 64  # connections whose request is incomplete
_MAX_FDS = 250  # the kernel passes 253 at once


class FileDescriptorServerAddress(msgspec.Struct, frozen=True):
    """Address and token of a FileDescriptorServer. A secret."""

    path: str
    token: bytes


@dataclass(frozen=True)
class MessageWithFds:
    """A message that names descriptors, and those descriptors."""

    message: msgspec.Struct
    fds: Sequence[int]


@dataclass(frozen=True)
class Connection:
    """A connection to a process that has received its message.

    Attributes:
        socket: The kernel closes it when either process ends.
        pid: The process id that the kernel reports, or None where it reports none.
    """

    socket: socket.socket
    pid: int | None


class FileDescriptorServer:
    """Sends each message once, to the first process that requests its key with the token.

    Args:
        messages: By key. The descriptors must stay open until `close`.
    """

    def __init__(self, messages: Mapping[int, MessageWithFds]) -> None:
        self._messages = dict(messages)
        self._connections: dict[int, Connection] = {}
        self._folder: str | None = None
        if sys.platform == "linux":  # abstract names leave nothing behind
            path = f"@mvllm-{secrets.token_hex(16)}"
        else:
            self._folder = tempfile.mkdtemp(prefix="mvllm-")  # accessible to this user only
            path = str(Path(self._folder) / "socket")
        self.address = FileDescriptorServerAddress(path, secrets.token_bytes(_TOKEN_BYTES))
        self._is_closed = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(_socket_address(path))
        self._listener.listen(len(messages) + _MAX_PENDING_CONNECTIONS)
        self._listener.setblocking(False)
        self._thread = threading.Thread(target=self._serve, name="fd-server", daemon=True)
        self._thread.start()

    def connection(self, key: int) -> Connection:
        """The connection to the process that received message `key`. Call it once; the caller then owns it."""
        return self._connections.pop(key)

    def close(self) -> None:
        """Stops listening. Connections that `connection` has returned stay open. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._thread.join()
        self._listener.close()
        for connection in self._connections.values():
            connection.socket.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _serve(self) -> None:
        """Accepts and reads connections without blocking, so that an incomplete request delays no other one."""
        pending: dict[int, _PendingConnection] = {}
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        while self._messages and not self._is_closed:
            ready = {fd for fd, _ in poll.poll(_POLL_SECONDS * 1e3)}
            for fd, pending_connection in list(pending.items()):
                if (
                    fd in ready and self._serve_connection(pending_connection)
                ) or time.monotonic() > pending_connection.deadline:
                    poll.unregister(fd)
                    pending.pop(fd).close()
            if self._listener.fileno() in ready:
                try:
                    peer, _ = self._listener.accept()
                except BlockingIOError:  # it has disconnected
                    continue
                except OSError as e:
                    logger.warning("Cannot accept a connection for file descriptors yet: %s", e)
                    time.sleep(_POLL_SECONDS)
                    continue
                pending[peer.fileno()] = _PendingConnection(peer)
                poll.register(peer, select.POLLIN)
                while len(pending) > _MAX_PENDING_CONNECTIONS:  # drops the oldest
                    fd = next(iter(pending))
                    poll.unregister(fd)
                    pending.pop(fd).close()
        for pending_connection in pending.values():
            pending_connection.close()

    def _serve_connection(self, pending_connection: _PendingConnection) -> bool:
        """Reads from the connection and answers a complete request; returns whether the connection is done."""
        try:
            request = pending_connection.receive()
            if request is None:
                return False
            self._send_descriptors(pending_connection, request)
        except (OSError, EOFError) as e:
            logger.warning("Refused a request for file descriptors: %s", e)
        return True

    def _send_descriptors(self, pending_connection: _PendingConnection, request: bytes) -> None:
        token, (key,) = request[:_TOKEN_BYTES], _KEY.unpack(request[_TOKEN_BYTES:].ljust(_KEY.size, b"\0"))
        if not hmac.compare_digest(token, self.address.token) or key not in self._messages:
            raise ConnectionError(_REFUSED_MESSAGE)
        message, peer = self._messages[key], pending_connection.socket
        peer.settimeout(_CONNECTION_TIMEOUT_SECONDS)
        # The worker may report to the engine as soon as this is sent, so the connection is stored first.
        self._connections[key] = Connection(peer, _pid_of(peer))
        try:
            socket.send_fds(peer, [b"\0"], list(message.fds))
            peer.sendall(encode_frame(msgspec.msgpack.encode([list(message.fds), message.message])))
        except OSError:
            del self._connections[key]
            raise
        peer.settimeout(None)
        pending_connection.is_kept = True
        del self._messages[key]


class _PendingConnection:
    """A connection, and the part of its request that was received so far.

    Attributes:
        deadline: When the request has to be complete, by time.monotonic().
        is_kept: Whether the connection stays open after the answer.
    """

    def __init__(self, peer: socket.socket) -> None:
        self.socket = peer
        self.deadline = time.monotonic() + _CONNECTION_TIMEOUT_SECONDS
        self.is_kept = False
        self._received = b""
        peer.setblocking(False)

    def receive(self) -> bytes | None:
        """The request, or None while it is incomplete. Call it when the socket is readable.

        Raises:
            EOFError, OSError: It has disconnected, or announces too many bytes.
        """
        part = self.socket.recv(LENGTH.size + _REQUEST_BYTES - len(self._received))
        if not part:
            raise EOFError("it disconnected before its request was complete")
        self._received += part
        if len(self._received) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._received)
        if length > _REQUEST_BYTES:
            raise ConnectionError(_REFUSED_MESSAGE)
        request = self._received[LENGTH.size :]
        return request[:length] if len(request) >= length else None

    def close(self) -> None:
        """Closes the socket, unless it is kept."""
        if not self.is_kept:
            self.socket.close()


def fetch_descriptors(
    address: FileDescriptorServerAddress, key: int, kind: type[T]
) -> tuple[T, dict[int, int], socket.socket]:
    """Requests a message with its descriptors.

    Args:
        address: The address of the server.
        key: The key of the message.
        kind: The type of the message.

    Returns:
        The message; a map from the descriptors that it names to those in this process; the connection.

    Raises:
        OSError: No process listens there, or the kernel refused.
        EOFError: The server refused the request.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_CONNECTION_TIMEOUT_SECONDS)
        _connect(connection, _socket_address(address.path))
        connection.sendall(encode_frame(address.token + _KEY.pack(key)))
        begin, fds, _, _ = socket.recv_fds(connection, 1, _MAX_FDS)
        for fd in fds:
            os.set_inheritable(fd, False)
        if not begin:
            raise EOFError("the engine closed the connection")
        named, message = msgspec.msgpack.decode(read_frame(connection.recv), type=tuple[list[int], msgspec.Raw])
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return msgspec.msgpack.decode(message, type=kind), dict(zip(named, fds, strict=True)), connection


def _connect(connection: socket.socket, name: str) -> None:
    """Connects, with retries: a non-blocking connect fails while the queue of connections is full."""
    deadline = time.monotonic() + _CONNECTION_TIMEOUT_SECONDS
    while True:
        try:
            return connection.connect(name)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _socket_address(path: str) -> str:
    return f"\0{path[1:]}" if path.startswith("@") else path


def _pid_of(peer: socket.socket) -> int | None:
    option: Any = getattr(socket, "SO_PEERCRED", None)
    if option is not None:
        with contextlib.suppress(OSError):
            pid, _, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size))
            return pid or None
    return None

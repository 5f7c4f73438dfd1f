"""Open files for processes of this machine that are not our children, for those who know a token.

    engine    door = FileDescriptorServer({0: MessageWithFds(message, fds), ...})   listens; door.address travels some
    other way worker    message, fds, control = fetch_descriptors(address, 0, kind)       the files are its own now
    engine    connection = door.connection(0)                         who came; the socket stays open between the two

The socket stays open on purpose: each side's death closes it, which is how the other one hears of that.
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
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from mvllm.executor.message_queue.queue import HAS_ABSTRACT_SOCKETS
from mvllm.executor.process.message_frames import LENGTH, encode_frame, read_frame
from mvllm.logging import get_logger

logger = get_logger(__name__)

T = TypeVar("T")

_TOKEN_BYTES = 32
_KEY = struct.Struct("=I")
_REQUEST_BYTES = _TOKEN_BYTES + _KEY.size
_CREDENTIALS = struct.Struct("=iII")  # Linux' struct ucred: pid, uid, gid
_POLL_SECONDS = 0.2
_CONNECTION_TIMEOUT_SECONDS = 10.0
_REFUSED_MESSAGE = "it did not know the token, or asked for what is not there"
_MAX_PENDING_CONNECTIONS = 64  # who have not said yet what they want
_MAX_FDS = 250  # the kernel takes 253 at once


class FileDescriptorServerAddress(msgspec.Struct, frozen=True):
    """Where a door is, and what opens it. A secret."""

    path: str
    token: bytes


@dataclass(frozen=True)
class MessageWithFds:
    """What one process gets: a message that names descriptors, and those descriptors."""

    message: msgspec.Struct
    fds: Sequence[int]


@dataclass(frozen=True)
class Connection:
    """A process that has got its message_with_fds.

    Attributes:
        socket: Closed when either side has ended.
        pid: Its process id as the kernel says, or None where the kernel does not.
    """

    socket: socket.socket
    pid: int | None


class FileDescriptorServer:
    """Gives each message_with_fds out once.

    Args:
        messages: By key. The descriptors have to stay open until `close`.
    """

    def __init__(self, messages: Mapping[int, MessageWithFds]) -> None:
        self._messages = dict(messages)
        self._connections: dict[int, Connection] = {}
        self._folder: str | None = None
        if HAS_ABSTRACT_SOCKETS:
            path = f"@mvllm-{secrets.token_hex(16)}"
        else:
            self._folder = tempfile.mkdtemp(prefix="mvllm-")  # only its owner may enter
            path = str(Path(self._folder) / "door")
        self.address = FileDescriptorServerAddress(path, secrets.token_bytes(_TOKEN_BYTES))
        self._is_closed = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(_socket_address(path))
        self._listener.listen(len(messages) + _MAX_PENDING_CONNECTIONS)
        self._listener.setblocking(False)
        self._thread = threading.Thread(target=self._serve, name="descriptor-door", daemon=True)
        self._thread.start()

    def connection(self, key: int) -> Connection:
        """The process that received the message `key`. Call it after its report; the caller owns the connection."""
        return self._connections.pop(key)

    def close(self) -> None:
        """Lets nobody in any more. Connections that were asked for live on. Idempotent."""
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
        """Accepts connections without waiting: one that sends nothing, or half a message, delays no other."""
        pending_connections: dict[int, _PendingConnection] = {}
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        while self._messages and not self._is_closed:
            ready = {fd for fd, _ in poll.poll(_POLL_SECONDS * 1e3)}
            for fd, pending_connection in list(pending_connections.items()):
                if (
                    fd in ready and self._serve_connection(pending_connection)
                ) or time.monotonic() > pending_connection.deadline:
                    poll.unregister(fd)
                    pending_connections.pop(fd).leave()
            if self._listener.fileno() in ready:
                try:
                    peer, _ = self._listener.accept()
                except BlockingIOError:  # it has left again
                    continue
                except OSError as e:
                    logger.warning("A process came for its open files and cannot be let in yet: %s", e)
                    time.sleep(_POLL_SECONDS)
                    continue
                pending_connections[peer.fileno()] = _PendingConnection(peer)
                poll.register(peer, select.POLLIN)
                while len(pending_connections) > _MAX_PENDING_CONNECTIONS:  # the one who has said nothing for longest
                    fd = next(iter(pending_connections))
                    poll.unregister(fd)
                    pending_connections.pop(fd).leave()
        for pending_connection in pending_connections.values():
            pending_connection.leave()

    def _serve_connection(self, pending_connection: _PendingConnection) -> bool:
        """Reads from the connection and answers a complete request; returns whether the connection is done."""
        try:
            request = pending_connection.hear()
            if request is None:
                return False
            self._send_descriptors(pending_connection, request)
        except (OSError, EOFError) as e:
            logger.warning("A process came for its open files and did not get them: %s", e)
        return True

    def _send_descriptors(self, pending_connection: _PendingConnection, request: bytes) -> None:
        token, (key,) = request[:_TOKEN_BYTES], _KEY.unpack(request[_TOKEN_BYTES:].ljust(_KEY.size, b"\0"))
        if not hmac.compare_digest(token, self.address.token) or key not in self._messages:
            raise ConnectionError(_REFUSED_MESSAGE)
        message_with_fds, peer = self._messages[key], pending_connection.socket
        peer.settimeout(_CONNECTION_TIMEOUT_SECONDS)
        # The worker may say that it has its message_with_fds as soon as this is sent, so the connection is noted first.
        self._connections[key] = Connection(peer, _pid_of(peer))
        try:
            socket.send_fds(peer, [b"\0"], list(message_with_fds.fds))
            peer.sendall(encode_frame(msgspec.msgpack.encode([list(message_with_fds.fds), message_with_fds.message])))
        except OSError:
            del self._connections[key]
            raise
        peer.settimeout(None)
        pending_connection.stays = True
        del self._messages[key]


class _PendingConnection:
    """Who has come, and what was heard of the request so far.

    Attributes:
        deadline: By when it has to have said all of it, by time.monotonic().
        stays: Whether the connection is used on.
    """

    def __init__(self, peer: socket.socket) -> None:
        self.socket = peer
        self.deadline = time.monotonic() + _CONNECTION_TIMEOUT_SECONDS
        self.stays = False
        self._heard = b""
        peer.setblocking(False)

    def hear(self) -> bytes | None:
        """The request, once it is whole. Call when there is something to hear.

        Raises:
            EOFError, OSError: It has left, or announces too much.
        """
        part = self.socket.recv(LENGTH.size + _REQUEST_BYTES - len(self._heard))
        if not part:
            raise EOFError("it left before it had said what it wanted")
        self._heard += part
        if len(self._heard) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._heard)
        if length > _REQUEST_BYTES:
            raise ConnectionError(_REFUSED_MESSAGE)
        request = self._heard[LENGTH.size :]
        return request[:length] if len(request) >= length else None

    def leave(self) -> None:
        """Closes the connection, unless it is used on."""
        if not self.stays:
            self.socket.close()


def fetch_descriptors(
    address: FileDescriptorServerAddress, key: int, kind: type[T]
) -> tuple[T, dict[int, int], socket.socket]:
    """Fetches a message_with_fds.

    Args:
        key: Which one.
        kind: What its message is.

    Returns:
        The message; descriptor as the message names it to descriptor in this process; the connection.

    Raises:
        OSError: Nobody is there, or the kernel refused.
        EOFError: The other side did not let us in.
    """
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        door.settimeout(_CONNECTION_TIMEOUT_SECONDS)
        _connect(door, _socket_address(address.path))
        door.sendall(encode_frame(address.token + _KEY.pack(key)))
        begin, fds, _, _ = socket.recv_fds(door, 1, _MAX_FDS)
        for fd in fds:
            os.set_inheritable(fd, False)
        if not begin:
            raise EOFError("the engine closed the connection")
        named, message = msgspec.msgpack.decode(read_frame(door.recv), type=tuple[list[int], msgspec.Raw])
        door.settimeout(None)
    except BaseException:
        door.close()
        raise
    return msgspec.msgpack.decode(message, type=kind), dict(zip(named, fds, strict=True)), door


def _connect(door: socket.socket, name: str) -> None:
    """Connects; the kernel does not wait by itself while too many others stand in line."""
    deadline = time.monotonic() + _CONNECTION_TIMEOUT_SECONDS
    while True:
        try:
            return door.connect(name)
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

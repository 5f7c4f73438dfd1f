"""The sockets between a front end and its engine cores.

    front end   ROUTER ── [token number] [Command] ──> DEALER   engine core      one of these per core
                PULL   <── [token EngineCoreOutputs] ───────── PUSH     engine core

The front end binds and cores connect. A front end may have several cores, told apart by the identity it gave each, and
a core several front ends, told apart by the socket. Addresses are random names that leave nothing behind (on Linux;
elsewhere a folder that only its owner may enter). The kernel turns away processes of other users, and what does not
begin with the token is dropped: the token is known to those alone who were told over the socket pair they were started
with.
"""

from __future__ import annotations

import atexit
import hmac
import os
import secrets
import shutil
import struct
import sys
import tempfile
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq

from mvllm.executor.message_queue.queue import HAS_ABSTRACT_SOCKETS
from mvllm.logging import get_logger
from mvllm.messages.core_protocol import Command
from mvllm.messages.requests import EngineCoreOutputs

logger = get_logger(__name__)

LINGER_MS = 1000  # how long a core that ends waits for its last news to be taken
RECONNECT_MS, MAX_RECONNECT_MS = 2, 100
_MAX_UNREAD_CONNECT_MESSAGES = 16  # of strangers; a front end reads its ROUTER only until its cores have come
_IPC_FILTER_UID = 59  # a socket option that pyzmq has no name for
_NUMBER = struct.Struct("!Q")
_TOKEN_BYTES = 32


class ChannelAddress(msgspec.Struct, frozen=True):
    """What an engine core must know to join.

    Attributes:
        commands, news: Where the front end is bound.
        identity: What the front end calls this core.
        token: What every message begins with.
    """

    commands: str
    updates: str
    identity: bytes
    token: bytes


def new_addresses(num_cores: int = 1) -> list[ChannelAddress]:
    """Where a front end can bind, and what it is to call each of its cores: names that nobody can guess.

    A stranger who came first under a core's name would keep the core out.
    """
    prefix = _socket_prefix()
    token = secrets.token_bytes(_TOKEN_BYTES)
    identities = [b"core-" + secrets.token_hex(16).encode() for _ in range(num_cores)]
    return [ChannelAddress(f"{prefix}commands", f"{prefix}news", identity, token) for identity in identities]


class ClientChannel:
    """The front end's end, for any number of cores. Used from one thread at a time.

    Args:
        addresses: For each core, as `new_addresses` made them.

    Attributes:
        addresses: The same.
    """

    def __init__(self, addresses: Sequence[ChannelAddress]) -> None:
        self.addresses = addresses
        place = addresses[0]
        self._token = place.token
        self._unconnected_identities = {address.identity for address in addresses}
        self._number = 0
        self._context = zmq.Context()
        self._commands = self._bind_socket(zmq.ROUTER, place.commands, _MAX_UNREAD_CONNECT_MESSAGES)
        self._commands.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.update_socket = self._bind_socket(zmq.PULL, place.updates, 0)
        self._decoder = msgspec.msgpack.Decoder(EngineCoreOutputs)
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def num_sent(self) -> int:
        """The number of the last command."""
        return self._number

    @property
    def commands(self) -> zmq.Socket[bytes]:
        """Readable when a core may have come."""
        return self._commands

    @property
    def update_fd(self) -> int:
        """A descriptor that becomes readable when news may have come, and says so once: read until there are none."""
        fd = self.update_socket.getsockopt(zmq.FD)
        assert isinstance(fd, int)
        return fd

    def all_connected(self) -> bool:
        """Whether every core has connected; before that, nothing can be sent."""
        while self._unconnected_identities:
            try:
                frames = self._commands.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            if len(frames) == 2 and hmac.compare_digest(frames[1], self._token):
                self._unconnected_identities.discard(frames[0])
        return True

    def send(self, identity: bytes, command: Command) -> int:
        """Queues a command; never blocks. Returns its number.

        Raises:
            zmq.ZMQError: The core is not connected (any more).
        """
        encoded = self._encoder.encode(command)  # what cannot be sent has no number: the core would never report it
        self._number += 1
        head = self._token + _NUMBER.pack(self._number)
        self._commands.send_multipart([identity, head, encoded], copy=False)
        return self._number

    def receive(self) -> EngineCoreOutputs | None:
        """The next news, or None when there are none now. What a stranger sent is dropped."""
        while True:
            try:
                message = self.update_socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if hmac.compare_digest(message[:_TOKEN_BYTES], self._token):
                return self._decoder.decode(memoryview(message)[_TOKEN_BYTES:])
            logger.warning("Dropped a message to the front end that does not carry its token")

    def close(self) -> None:
        """Idempotent."""
        self._commands.close(linger=0)
        self.update_socket.close(linger=0)
        self._context.term()

    def _bind_socket(self, kind: int, address: str, receive_limit: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, receive_limit)
        if sys.platform == "linux":
            socket.setsockopt(_IPC_FILTER_UID, os.getuid())  # the kernel says who connects
        socket.bind(address)
        return socket


class CoreInputChannel:
    """A core's receiving end. Used by one thread.

    Args:
        addresses: Of its front ends.
    """

    def __init__(self, addresses: Sequence[ChannelAddress]) -> None:
        self._tokens = [address.token for address in addresses]
        self._context = zmq.Context()
        self._sockets = []
        self._poller = zmq.Poller()
        self._ready: deque[int] = deque()
        for address in addresses:
            socket = _connect_socket(self._context, zmq.DEALER, address.commands, address.identity)
            socket.send(address.token)  # the front end can send nothing before it has heard of us
            self._sockets.append(socket)
            self._poller.register(socket, zmq.POLLIN)
        self._index = {socket: index for index, socket in enumerate(self._sockets)}
        self._decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)

    def receive(self) -> tuple[int, int, Command]:
        """Waits for the next command; returns which front end it is from, and its number. What cannot be one is
        dropped."""
        while True:
            source, frames = self._next()
            head = frames[0].bytes
            if len(frames) != 2 or not hmac.compare_digest(head[: -_NUMBER.size], self._tokens[source]):
                logger.warning("Dropped a message to the engine core that does not carry its token")
                continue
            try:
                command = self._decoder.decode(frames[1].buffer)
            except (msgspec.MsgspecError, UnicodeDecodeError) as e:
                logger.error("Dropped a message to the engine core that is no command: %s", e)
                continue
            return source, _NUMBER.unpack(head[-_NUMBER.size :])[0], command

    def close(self) -> None:
        """Call from the thread that receives. Idempotent."""
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.term()

    def _next(self) -> tuple[int, list[zmq.Frame]]:
        """The next message of anybody: one of each in turn, so that none has to wait for another's many."""
        if len(self._sockets) == 1:
            return 0, self._sockets[0].recv_multipart(copy=False)
        while True:
            while not self._ready:
                self._ready.extend(self._index[socket] for socket, _ in self._poller.poll())
            source = self._ready.popleft()
            try:
                return source, self._sockets[source].recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                continue


class CoreOutputChannel:
    """A core's sending end. Used by one thread.

    Args:
        addresses: Of its front ends.
    """

    def __init__(self, addresses: Sequence[ChannelAddress]) -> None:
        self._context = zmq.Context()
        self._sockets = [_connect_socket(self._context, zmq.PUSH, address.updates, None) for address in addresses]
        self._encoder = msgspec.msgpack.Encoder()
        self._messages = [bytearray(address.token) for address in addresses]

    def send(self, target: int, news: EngineCoreOutputs) -> None:
        """Queues news for one of the front ends; never blocks."""
        message = self._messages[target]
        self._encoder.encode_into(news, message, _TOKEN_BYTES)
        self._sockets[target].send(message)

    def close(self) -> None:
        """Waits up to a second until everything has been taken."""
        for socket in self._sockets:
            socket.close(linger=LINGER_MS)
        self._context.term()


def _connect_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str, identity: bytes | None
) -> zmq.Socket:
    socket = context.socket(kind)
    if identity is not None:
        socket.setsockopt(zmq.ROUTING_ID, identity)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
    socket.connect(address)
    return socket


def _socket_prefix() -> str:
    if HAS_ABSTRACT_SOCKETS:
        return f"ipc://@mvllm-{secrets.token_hex(16)}-"
    folder = tempfile.mkdtemp(prefix="mvllm-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return f"ipc://{folder}/"

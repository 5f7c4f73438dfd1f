"""The sockets between a front end and its engine cores.

    front end   ROUTER ── [token number] [Command] ──> DEALER   engine core      one of these per core
                PULL   <── [token CoreNews] ────────── PUSH     engine core

The front end binds and cores connect, so a front end may have several cores, told apart by the identity it gave each.
Addresses are random names that leave nothing behind (on Linux; elsewhere a folder that only its owner may enter). The
kernel turns away processes of other users, and what does not begin with the token is dropped: the token is known to
those alone who were told over the socket pair they were started with.
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
from collections.abc import Sequence

import msgspec
import zmq

from mvllm.executor.message_queue.queue import HAS_ABSTRACT_SOCKETS
from mvllm.logging import get_logger
from mvllm.messages.core_protocol import Command, CoreNews

logger = get_logger(__name__)

LINGER_MS = 1000  # how long a core that ends waits for its last news to be taken
RECONNECT_MS, MAX_RECONNECT_MS = 2, 100
_MAX_UNREAD_HELLOS = 16  # of strangers; a front end reads its ROUTER only until its cores have come
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
    news: str
    identity: bytes
    token: bytes


class FrontChannel:
    """The front end's end, for any number of cores. Used from one thread at a time.

    Args:
        identities: What to call each core.

    Attributes:
        addresses: For each core, in the same order.
    """

    def __init__(self, identities: Sequence[bytes]) -> None:
        prefix = _socket_prefix()
        token = secrets.token_bytes(_TOKEN_BYTES)
        self.addresses = [
            ChannelAddress(f"{prefix}commands", f"{prefix}news", identity, token) for identity in identities
        ]
        self._token = token
        self._absent = set(identities)
        self._number = 0
        self._context = zmq.Context()
        self._commands = self._bound(zmq.ROUTER, f"{prefix}commands", _MAX_UNREAD_HELLOS)
        self._commands.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.news = self._bound(zmq.PULL, f"{prefix}news", 0)
        self._decoder = msgspec.msgpack.Decoder(CoreNews)
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
    def news_fd(self) -> int:
        """A descriptor that becomes readable when news may have come, and says so once: read until there are none."""
        fd = self.news.getsockopt(zmq.FD)
        assert isinstance(fd, int)
        return fd

    def all_here(self) -> bool:
        """Whether every core has connected; before that, nothing can be sent."""
        while self._absent:
            try:
                frames = self._commands.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            if len(frames) == 2 and hmac.compare_digest(frames[1], self._token):
                self._absent.discard(frames[0])
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

    def receive(self) -> CoreNews | None:
        """The next news, or None when there are none now. What a stranger sent is dropped."""
        while True:
            try:
                message = self.news.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if hmac.compare_digest(message[:_TOKEN_BYTES], self._token):
                return self._decoder.decode(memoryview(message)[_TOKEN_BYTES:])
            logger.warning("Dropped a message to the front end that does not carry its token")

    def close(self) -> None:
        """Idempotent."""
        self._commands.close(linger=0)
        self.news.close(linger=0)
        self._context.term()

    def _bound(self, kind: int, address: str, receive_limit: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, receive_limit)
        if sys.platform == "linux":
            socket.setsockopt(_IPC_FILTER_UID, os.getuid())  # the kernel says who connects
        socket.bind(address)
        return socket


class CoreInput:
    """A core's receiving end. Used by one thread.

    Args:
        address: Of the front end.
    """

    def __init__(self, address: ChannelAddress) -> None:
        self._token = address.token
        self._context = zmq.Context()
        self._socket = _connected(self._context, zmq.DEALER, address.commands, address.identity)
        self._socket.send(address.token)  # the front end can send nothing before it has heard of us
        self._decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)

    def receive(self) -> tuple[int, Command]:
        """Waits for the next command; returns its number with it. What cannot be one is dropped."""
        while True:
            frames = self._socket.recv_multipart(copy=False)
            head = frames[0].bytes
            if len(frames) != 2 or not hmac.compare_digest(head[: -_NUMBER.size], self._token):
                logger.warning("Dropped a message to the engine core that does not carry its token")
                continue
            try:
                command = self._decoder.decode(frames[1].buffer)
            except (msgspec.MsgspecError, UnicodeDecodeError) as e:
                logger.error("Dropped a message to the engine core that is no command: %s", e)
                continue
            return _NUMBER.unpack(head[-_NUMBER.size :])[0], command

    def close(self) -> None:
        """Call from the thread that receives. Idempotent."""
        self._socket.close(linger=0)
        self._context.term()


class CoreOutput:
    """A core's sending end. Used by one thread.

    Args:
        address: Of the front end.
    """

    def __init__(self, address: ChannelAddress) -> None:
        self._context = zmq.Context()
        self._socket = _connected(self._context, zmq.PUSH, address.news, None)
        self._encoder = msgspec.msgpack.Encoder()
        self._message = bytearray(address.token)

    def send(self, news: CoreNews) -> None:
        """Queues news; never blocks."""
        self._encoder.encode_into(news, self._message, _TOKEN_BYTES)
        self._socket.send(self._message)

    def close(self) -> None:
        """Waits up to a second until everything has been taken."""
        self._socket.close(linger=LINGER_MS)
        self._context.term()


def _connected(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str, identity: bytes | None) -> zmq.Socket:
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

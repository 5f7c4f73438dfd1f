"""The sockets between a front end and its engine cores.

    front end   ROUTER ── [token number] [CoreMessage] ──> DEALER   engine core   one of these per core
                PULL   <── [token EngineCoreOutputs] ───────── PUSH     engine core

The front end binds and cores connect. A front end may have several cores, each with its own identity, and a core
several front ends, each with its own sockets. Addresses are random (`ipc_sockets.py`), the kernel refuses processes of
other users, and messages that do not begin with the token are dropped: child processes receive the token with their
start arguments, over an inherited socket pair.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq

from mvllm.executor.message_queue.ipc_sockets import bind_ipc_socket, connect_ipc_socket, make_ipc_prefix
from mvllm.logging import get_logger
from mvllm.messages.core_protocol import CoreMessage
from mvllm.messages.requests import EngineCoreOutputs

logger = get_logger(__name__)

LINGER_MS = 1000  # how long a core that exits waits for its last updates to be received
_MAX_UNREAD_CONNECT_MESSAGES = 16  # the ROUTER socket is read only until the cores have connected
_NUMBER = struct.Struct("!Q")
_TOKEN_BYTES = 32


class ChannelAddress(msgspec.Struct, frozen=True):
    """The sockets between one front end and one engine core.

    Attributes:
        commands, updates: The addresses that the front end binds.
        identity: The core's identity at the front end's ROUTER socket.
        token: The first bytes of every message.
    """

    commands: str
    updates: str
    identity: bytes
    token: bytes


def new_addresses(num_cores: int = 1) -> list[ChannelAddress]:
    """New addresses of one front end, one per core.

    Identities are random: another process that connected first with a core's identity would lock the core out.
    """
    prefix = make_ipc_prefix()
    token = secrets.token_bytes(_TOKEN_BYTES)
    identities = [b"core-" + secrets.token_hex(16).encode() for _ in range(num_cores)]
    return [ChannelAddress(f"{prefix}commands", f"{prefix}updates", identity, token) for identity in identities]


class ClientChannel:
    """The front end's sockets, for any number of cores. Used from one thread at a time.

    Args:
        addresses: From `new_addresses`, one per core.

    Attributes:
        addresses: As given.
    """

    def __init__(self, addresses: Sequence[ChannelAddress]) -> None:
        self.addresses = addresses
        first = addresses[0]
        self._token = first.token
        self._unconnected_identities = {address.identity for address in addresses}
        self._number = 0
        self._context = zmq.Context()
        self._commands = self._bind_socket(zmq.ROUTER, first.commands, _MAX_UNREAD_CONNECT_MESSAGES)
        self._commands.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.update_socket = self._bind_socket(zmq.PULL, first.updates, 0)
        self._decoder = msgspec.msgpack.Decoder(EngineCoreOutputs)
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def num_sent(self) -> int:
        """The number of the last command."""
        return self._number

    @property
    def commands(self) -> zmq.Socket[bytes]:
        """The socket that becomes readable when a core may have connected."""
        return self._commands

    @property
    def update_fd(self) -> int:
        """An edge-triggered descriptor: when it becomes readable, call `receive` until it returns None."""
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

    def send(self, identity: bytes, command: CoreMessage) -> int:
        """Queues a command; never blocks. Returns its number.

        Raises:
            zmq.ZMQError: The core is not connected (any more).
        """
        encoded = self._encoder.encode(command)  # first: a command that cannot be encoded must not take a number
        self._number += 1
        head = self._token + _NUMBER.pack(self._number)
        self._commands.send_multipart([identity, head, encoded], copy=False)
        return self._number

    def receive(self) -> EngineCoreOutputs | None:
        """The next update, or None if there is none now. Messages without the token are dropped."""
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
        bind_ipc_socket(socket, address)
        return socket


class CoreInputChannel:
    """An engine core's sockets for commands. Used by one thread.

    Args:
        addresses: One per front end.
    """

    def __init__(self, addresses: Sequence[ChannelAddress]) -> None:
        self._tokens = [address.token for address in addresses]
        self._context = zmq.Context()
        self._sockets = []
        self._poller = zmq.Poller()
        self._ready: deque[int] = deque()
        for address in addresses:
            socket = _connect_socket(self._context, zmq.DEALER, address.commands, address.identity)
            socket.send(address.token)  # the front end can send nothing before this message
            self._sockets.append(socket)
            self._poller.register(socket, zmq.POLLIN)
        self._index = {socket: index for index, socket in enumerate(self._sockets)}
        self._decoder: msgspec.msgpack.Decoder[CoreMessage] = msgspec.msgpack.Decoder(CoreMessage)

    def receive(self) -> tuple[int, int, CoreMessage]:
        """Waits for the next command; returns the front end's index, the command's number there, and the command.

        Messages without the token, or that are not commands, are dropped.
        """
        while True:
            source, frames = self._next()
            head = frames[0].bytes
            if len(frames) != 2 or not hmac.compare_digest(head[: -_NUMBER.size], self._tokens[source]):
                logger.warning("Dropped a message to the engine core that does not carry its token")
                continue
            try:
                command = self._decoder.decode(frames[1].buffer)
            except (msgspec.MsgspecError, UnicodeDecodeError) as e:
                logger.error("Dropped a message to the engine core that is not a command: %s", e)
                continue
            return source, _NUMBER.unpack(head[-_NUMBER.size :])[0], command

    def close(self) -> None:
        """Call from the thread that receives. Idempotent."""
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.term()

    def _next(self) -> tuple[int, list[zmq.Frame]]:
        """The next message, from each front end in turn, so that none waits for many messages of another."""
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
    """An engine core's sockets for updates. Used by one thread.

    Args:
        addresses: One per front end.
    """

    def __init__(self, addresses: Sequence[ChannelAddress]) -> None:
        self._context = zmq.Context()
        self._sockets = [_connect_socket(self._context, zmq.PUSH, address.updates, None) for address in addresses]
        self._encoder = msgspec.msgpack.Encoder()
        self._messages = [bytearray(address.token) for address in addresses]

    def send(self, target: int, update: EngineCoreOutputs) -> None:
        """Queues an update for one of the front ends; never blocks."""
        message = self._messages[target]
        self._encoder.encode_into(update, message, _TOKEN_BYTES)
        self._sockets[target].send(message)

    def close(self) -> None:
        """Waits up to a second until all updates have been received."""
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
    connect_ipc_socket(socket, address)
    return socket

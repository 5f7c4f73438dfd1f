"""The sockets between a front end and its engine cores.

    front end   ROUTER ── [token number] [CoreMessage] ──> DEALER   engine core
                PULL   <── [token EngineCoreOutputs] ───────── PUSH

The front end binds and the core connects. A core may have several front ends, and a front end several cores, each pair
with its own sockets. Addresses are random (`ipc_sockets.py`), the kernel refuses processes of
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
_MAX_UNREAD_CONNECT_MESSAGES = 16  # the ROUTER socket is read only until the core has connected
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


def new_address() -> ChannelAddress:
    """A new address of a front end, for one core.

    Its identity is random: another process that connected first with the core's identity would lock the core out.
    """
    prefix = make_ipc_prefix()
    identity = b"core-" + secrets.token_hex(16).encode()
    return ChannelAddress(f"{prefix}commands", f"{prefix}updates", identity, secrets.token_bytes(_TOKEN_BYTES))


class ClientChannel:
    """The front end's sockets. Used from one thread at a time.

    Args:
        address: From `new_address`.

    Attributes:
        address: As given.
        commands: The socket that becomes readable when the core may have connected.
        update_socket: The socket of the core's updates.
        num_sent: The number of the last command.
    """

    def __init__(self, address: ChannelAddress) -> None:
        self.address = address
        self.num_sent = 0
        self._token = address.token
        self._is_connected = False
        self._context = zmq.Context()
        self.commands = self._bind_socket(zmq.ROUTER, address.commands, _MAX_UNREAD_CONNECT_MESSAGES)
        self.commands.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.update_socket = self._bind_socket(zmq.PULL, address.updates, 0)
        self._decoder = msgspec.msgpack.Decoder(EngineCoreOutputs)
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def update_fd(self) -> int:
        """An edge-triggered descriptor: when it becomes readable, call `receive` until it returns None."""
        fd = self.update_socket.getsockopt(zmq.FD)
        assert isinstance(fd, int)
        return fd

    def is_connected(self) -> bool:
        """Whether the core has connected; before that, nothing can be sent."""
        while not self._is_connected:
            try:
                frames = self.commands.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            if len(frames) == 2 and hmac.compare_digest(frames[1], self._token):
                self._is_connected = frames[0] == self.address.identity
        return True

    def send(self, command: CoreMessage) -> int:
        """Queues a command; never blocks. Returns its number.

        Raises:
            zmq.ZMQError: The core is not connected (any more).
        """
        encoded = self._encoder.encode(command)  # first: a command that cannot be encoded must not take a number
        self.num_sent += 1
        head = self._token + _NUMBER.pack(self.num_sent)
        self.commands.send_multipart([self.address.identity, head, encoded], copy=False)
        return self.num_sent

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
        self.commands.close(linger=0)
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

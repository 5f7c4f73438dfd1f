"""Sockets for messages that are too large for a slot, between processes of one machine: one ZeroMQ pipe per reader.

A slot announces the message and is occupied like any other, so the ring provides back-pressure and order, and the
socket needs no limit. The reader's end binds and the writer's end connects, so a message can be sent before its reader
has opened the socket. Both ends open at the first such message; without one, ZeroMQ is not loaded.

The names are in Linux' abstract namespace, which leaves no files behind. They are random, the reader's end refuses
processes of other users (the kernel reports the user), and messages without the queue's token are dropped.
"""

from __future__ import annotations

import hmac
import logging
import select
import struct
import time
from collections.abc import Sequence

import zmq

from mvllm.executor.message_queue.errors import PeerDiedError, QueueCorruptError, QueueTimeoutError
from mvllm.executor.message_queue.ipc_sockets import bind_ipc_socket, connect_ipc_socket
from mvllm.executor.message_queue.notifier import StopSignal
from mvllm.executor.message_queue.peers import Peer
from mvllm.executor.message_queue.waiter import Waiter

logger = logging.getLogger(__name__)

LINGER_MS = 2000  # how long a closing writer waits for readers to receive the last large messages
GRACE_SECONDS = 0.2  # data that a writer sent before its death may still be in the kernel


class OverflowSender:
    """The writer's end.

    Args:
        addresses: One per reader.
        token: The token of the queue.
    """

    def __init__(self, addresses: Sequence[str], token: bytes) -> None:
        self._token = token
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes] | None] = []
        for address in addresses:
            socket = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.SNDHWM, 0)  # the ring limits the number of messages
            socket.setsockopt(zmq.LINGER, LINGER_MS)
            connect_ipc_socket(socket, address)
            self._sockets.append(socket)

    def send(self, sequence: int, frames: Sequence[bytes | memoryview]) -> None:
        """Queues one message for every reader. Never blocks. Frames may be changed once this returns."""
        header = self._token + struct.pack("!Q", sequence)
        parts = [zmq.Frame(header), *shared_frames(frames)]
        for socket in self._sockets:
            if socket is not None:
                socket.send_multipart(parts, copy=False)

    def drop_reader(self, index: int) -> None:
        socket = self._sockets[index]
        if socket is not None:
            socket.close(linger=0)
            self._sockets[index] = None

    def close(self) -> None:
        """Closes the sockets, after up to 2 s for undelivered messages. Idempotent."""
        for socket in self._sockets:
            if socket is not None:
                socket.close()
        self._sockets = []
        self._context.term()


class OverflowReceiver:
    """A reader's end.

    Args:
        name: The queue's name, for errors.
        address: The address to bind.
        token: The token of the queue.
        peer: The writer.
        stop: Ends every wait, or None.
    """

    def __init__(self, name: str, address: str, token: bytes, peer: Peer, stop: StopSignal | None) -> None:
        self._name = name
        self._token = token
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        bind_ipc_socket(self._socket, address)
        self._fd: int = self._socket.getsockopt(zmq.FD)  # type: ignore[assignment]
        self._waiter = Waiter(name, [peer], stop)
        self._waiter.add(self._fd)

    def receive(self, sequence: int, deadline: float | None) -> list[memoryview]:
        """The frames of message `sequence`.

        Raises:
            QueueTimeoutError, PeerDiedError, QueueStoppedError: As in Waiter.wait; the call can be repeated.
            QueueCorruptError: The socket holds another message than the slot announced.
        """
        while True:
            parts = self._receive_next()
            if parts is not None:
                return self._checked(parts, sequence)
            try:
                if not self._waiter.wait(deadline, f"the large message {sequence}"):
                    raise QueueTimeoutError(f"Queue {self._name}: the large message {sequence} did not come in time.")
            except PeerDiedError:
                if not self._arrives_within(GRACE_SECONDS):
                    raise

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()
        self._context.term()

    def _receive_next(self) -> list[memoryview] | None:
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return None
            views = [part.buffer for part in parts]
            if hmac.compare_digest(bytes(views[0][:-8]), self._token) and len(views) > 1:
                return views
            logger.warning("Queue %s: dropped a message that does not carry the queue's token", self._name)

    def _checked(self, parts: list[memoryview], sequence: int) -> list[memoryview]:
        (found,) = struct.unpack("!Q", parts[0][-8:])
        if found != sequence:
            raise QueueCorruptError(
                f"Queue {self._name}: a slot announced the large message {sequence}, the socket has {found}."
            )
        return parts[1:]

    def _arrives_within(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        while (left := until - time.monotonic()) > 0:
            poll.poll(left * 1e3)
            if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return True
        return False


def shared_frames(frames: Sequence[bytes | memoryview]) -> list[zmq.Frame]:
    """ZeroMQ frames that several sockets can send. `bytes` are immutable and need no copy; other buffers are copied."""
    return [zmq.Frame(frame, copy=not isinstance(frame, bytes)) for frame in frames]

"""The transport of a queue to readers on other machines: ZeroMQ over TCP.

    writer   ROUTER, bound     -> [sequence] [frame 0] [frame 1] ...       or [] to check that the reader is alive
    reader   DEALER, connects  -> [released, pid]                          at attach, and at every release

Back-pressure works as in the ring: a message may be sent when every reader has released the one `num_slots` before it,
so the buffers need no other limit.

Every connection uses CURVE: it is encrypted, and ZeroMQ refuses it unless the reader has the secret key in the queue's
handle. Data of other peers never reaches this code.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import struct
import threading
import time
from collections.abc import Sequence

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from mvllm.errors import ConfigError
from mvllm.executor.message_queue.errors import (
    PeerDiedError,
    QueueCorruptError,
    QueueTimeoutError,
)
from mvllm.executor.message_queue.handles import RemoteReaderHandle
from mvllm.executor.message_queue.notifier import StopSignal
from mvllm.executor.message_queue.overflow_socket import LINGER_MS, shared_frames
from mvllm.executor.message_queue.peers import Peer
from mvllm.executor.message_queue.waiter import POLL_SECONDS, Waiter

logger = logging.getLogger(__name__)

HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 1000, 5000  # detects a machine that vanished
_MAX_REPORT_BYTES = 4096  # the handshake must fit as well
_REPORT = struct.Struct("!QQ")
_LAST_MESSAGE_SECONDS = 5.0
"""How long a reader waits for the last message after the end of the connection. ZeroMQ reports the end just before it
delivers the message; on a busy machine its thread may wait for a core in between."""


class RemoteSender:
    """The writer's end for remote readers.

    Args:
        name, writer_name: The names of the queue and its writer.
        reader_names: The names of the remote readers.
        num_slots: The number of messages that may be unread at each.
        host: The address of this machine to listen at; a free port is chosen.
    """

    def __init__(self, name: str, writer_name: str, reader_names: Sequence[str], num_slots: int, host: str) -> None:
        if not zmq.has("curve"):
            raise ConfigError("Remote readers need ZeroMQ with CURVE; the installed pyzmq was built without it.")
        self._name = name
        self._writer_name = writer_name
        self._num_slots = num_slots
        self._host = host
        self._reports = [_Report() for _ in reader_names]
        self.peers = [_remote_peer(n, i, report) for i, (n, report) in enumerate(zip(reader_names, self._reports))]
        self._server_key, server_secret = zmq.curve_keypair()
        self._reader_keys = zmq.curve_keypair()
        self._context = zmq.Context()
        self._authenticator = _ZapAuthenticator(self._context, z85.decode(self._reader_keys[0]))
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.CURVE_SERVER, 1),
            (zmq.CURVE_SECRETKEY, server_secret),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.LINGER, LINGER_MS),
            (zmq.MAXMSGSIZE, _MAX_REPORT_BYTES),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
            (zmq.IPV6, int(":" in host)),
        ):
            self._socket.setsockopt(option, value)
        self._port = self._bind(host)
        self._fd: int = self._socket.getsockopt(zmq.FD)  # type: ignore[assignment]
        self._waiter: Waiter | None = None

    def use_stop(self, stop: StopSignal | None) -> None:
        """Sets the signal that ends every wait. Call it before the first wait."""
        self._waiter = Waiter(self._name, [], stop)
        self._waiter.add(self._fd)

    def handle(self, index: int) -> RemoteReaderHandle:
        return RemoteReaderHandle(
            queue=self._name,
            index=index,
            host=self._host,
            port=self._port,
            writer=self._writer_name,
            server_key=self._server_key,
            public_key=self._reader_keys[0],
            secret_key=self._reader_keys[1],
        )

    def wait_for_credit(self, sequence: int, deadline: float | None) -> None:
        """Returns when every remote reader is connected and may receive message `sequence`.

        Raises:
            QueueTimeoutError, PeerDiedError, QueueStoppedError: As RingWriter.wait_for_slot.
        """
        assert self._waiter is not None, "use_stop was not called"
        waiting_for = f"room for message {sequence} at remote readers"
        while True:
            self._read_reports()
            self._raise_if_dead(waiting_for)
            behind = self._behind(sequence - self._num_slots)
            if not behind:
                return
            now = time.monotonic()
            until = now + POLL_SECONDS if deadline is None else min(deadline, now + POLL_SECONDS)
            if not self._waiter.wait(until, waiting_for):
                self._ping(behind)
                if deadline is not None and time.monotonic() >= deadline:
                    raise self._timeout(sequence, behind)

    def send(self, sequence: int, frames: Sequence[bytes | memoryview]) -> None:
        """Queues one message for every remote reader. Never blocks; the next wait reports a dead reader."""
        parts = [zmq.Frame(struct.pack("!Q", sequence)), *shared_frames(frames)]
        for index, peer in enumerate(self.peers):
            if not peer.is_dropped:
                self._send_to(index, parts)

    def drop_reader(self, index: int) -> None:
        self.peers[index].drop()

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()
        self._context.term()  # wakes the authenticator, which closes its socket
        self._authenticator.join()

    def _bind(self, host: str) -> int:
        try:
            return self._socket.bind_to_random_port(f"tcp://{f'[{host}]' if ':' in host else host}")
        except zmq.ZMQError as e:
            self.close()
            raise ConfigError(
                f"The queue {self._name!r} was asked to listen at {host!r}: {e.strerror}. Name an address of this "
                "machine that the other machines can reach."
            ) from e

    def _send_to(self, index: int, parts: Sequence[zmq.Frame]) -> None:
        try:
            self._socket.send_multipart([_routing_id(index), *parts], copy=False)
        except zmq.ZMQError as e:
            if e.errno != zmq.EHOSTUNREACH:
                raise
            if self._reports[index].is_connected:
                self.peers[index].mark_dead()

    def _ping(self, indices: Sequence[int]) -> None:
        for index in indices:
            if self._reports[index].is_connected:
                self._send_to(index, [zmq.Frame(b"")])

    def _read_reports(self) -> None:
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            index = _index_of(parts[0])
            if index < len(self._reports) and len(parts) == 2 and len(parts[1]) >= _REPORT.size:
                self._reports[index].update(parts[1])

    def _raise_if_dead(self, waiting_for: str) -> None:
        for peer in self.peers:
            if peer.is_dead and not peer.is_dropped:
                raise peer.died_error(self._name, waiting_for)

    def _behind(self, oldest: int) -> list[int]:
        return [
            index
            for index, (peer, report) in enumerate(zip(self.peers, self._reports))
            if not peer.is_dropped and (not report.is_connected or report.released < oldest)
        ]

    def _timeout(self, sequence: int, behind: Sequence[int]) -> QueueTimeoutError:
        who = "; ".join(f"remote {self.peers[index].describe()}" for index in behind)
        return QueueTimeoutError(
            f"Queue {self._name}: no room for message {sequence} in time. Waited for {who}. At most {self._num_slots} "
            "messages may be on their way."
        )


class RemoteSource:
    """Receives messages from a writer on another machine. See MessageSource.

    Args:
        handle: The handle from the writer.
        stop: Ends every wait, or None.
    """

    in_place = False

    def __init__(self, handle: RemoteReaderHandle, stop: StopSignal | None) -> None:
        self.name = handle.queue
        self._handle = handle
        self._released = 0
        self._frames: list[memoryview] | None = None
        self._is_connected = False
        self._failure = ""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.CURVE_SERVERKEY, handle.server_key),
            (zmq.CURVE_PUBLICKEY, handle.public_key),
            (zmq.CURVE_SECRETKEY, handle.secret_key),
            (zmq.ROUTING_ID, _routing_id(handle.index)),
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.LINGER, LINGER_MS),
            (zmq.RECONNECT_IVL, -1),  # a broken connection counts as a dead peer
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
            (zmq.IPV6, int(":" in handle.host)),
        ):
            self._socket.setsockopt(option, value)
        self._monitor = self._socket.get_monitor_socket()
        host = f"[{handle.host}]" if ":" in handle.host else handle.host
        self._socket.connect(f"tcp://{host}:{handle.port}")
        self.fds: list[int] = [s.getsockopt(zmq.FD) for s in (self._socket, self._monitor)]  # type: ignore[misc]
        self.peers: list[Peer] = []  # the connection shows the death of the writer
        self._waiter = Waiter(self.name, [], stop)
        for fd in self.fds:
            self._waiter.add(fd)
        self._report()

    @property
    def sequence(self) -> int:
        return self._released + 1

    def hint(self) -> bool:
        return False

    def has_message(self) -> bool:
        if self._frames is None:
            self._frames = self._receive_next()
        if self._frames is None and self._read_events():
            if self._socket.poll(int(_LAST_MESSAGE_SECONDS * 1e3)):
                self._frames = self._receive_next()
            if self._frames is None:
                raise self._broken()
        return self._frames is not None

    def receive(self, deadline: float | None) -> list[memoryview]:
        while not self.has_message():
            if not self._waiter.wait(deadline, f"message {self.sequence}"):
                raise QueueTimeoutError(
                    f"Queue {self.name}: message {self.sequence} did not come in time from {self._writer()}."
                )
        assert self._frames is not None
        return self._frames

    def release(self) -> None:
        self._frames = None
        self._released += 1
        self._report()

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0 if self._failure else None)
        self._context.term()

    def _report(self) -> None:
        with contextlib.suppress(zmq.Again):  # the writer is dead, which the next wait reports
            self._socket.send(_REPORT.pack(self._released, os.getpid()), zmq.NOBLOCK)

    def _receive_next(self) -> list[memoryview] | None:
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return None
            if len(parts) == 1 and len(parts[0]) == 0:
                continue  # the writer's check of this reader
            views = [part.buffer for part in parts]
            found = struct.unpack("!Q", views[0])[0] if len(views[0]) == 8 else None
            if found != self.sequence or len(views) < 2:
                raise QueueCorruptError(f"Queue {self.name}: message {self.sequence} was due, message {found} came.")
            return views[1:]

    def _read_events(self) -> bool:
        """Reads the events of the connection; returns whether it is broken."""
        while True:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return bool(self._failure)
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_connected = True
            elif event in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
                self._failure = "refused our key"
            elif event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL):
                gone = "closed the connection, or its machine is gone" if self._is_connected else "cannot be reached"
                self._failure = self._failure or gone

    def _writer(self) -> str:
        return f"the writer ({self._handle.writer}, at {self._handle.host} port {self._handle.port})"

    def _broken(self) -> PeerDiedError:
        return PeerDiedError(
            f"Queue {self.name}: {self._writer()} {self._failure}. It was needed for message {self.sequence}.",
            name=self._handle.writer,
            index=None,
            pid=None,
        )


class _Report:
    """The last report of a remote reader."""

    def __init__(self) -> None:
        self.is_connected = False
        self.released = 0
        self.pid = 0

    def update(self, body: bytes) -> None:
        self.is_connected = True
        self.released, self.pid = _REPORT.unpack_from(body)


class _ZapAuthenticator(threading.Thread):
    """The thread that accepts or refuses the keys of connecting readers, through ZeroMQ's ZAP protocol."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], accepted: bytes) -> None:
        super().__init__(name="queue-authenticator", daemon=True)
        self._accepted = accepted
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind("inproc://zeromq.zap.01")  # RFC 27
        self.start()

    def run(self) -> None:
        try:
            while True:
                self._answer(self._socket.recv_multipart())
        except zmq.ContextTerminated:
            self._socket.close()

    def _answer(self, request: Sequence[bytes]) -> None:
        version, request_id, _domain, address, _identity, mechanism, *credentials = request
        is_known = mechanism == b"CURVE" and hmac.compare_digest(b"".join(credentials), self._accepted)
        if not is_known:
            logger.warning("Refused a connection from %s: not a key of this queue", address.decode(errors="replace"))
        status = [b"200", b"OK", b"reader", b""] if is_known else [b"400", b"not a key of this queue", b"", b""]
        self._socket.send_multipart([version, request_id, *status])


def _remote_peer(name: str, index: int, report: _Report) -> Peer:
    return Peer(name, index, lambda: report.pid)


def _routing_id(index: int) -> bytes:
    return b"r" + struct.pack("!I", index)  # must not begin with a zero byte, which ZeroMQ reserves


def _index_of(routing_id: bytes) -> int:
    is_ours = len(routing_id) == 5 and routing_id[:1] == b"r"
    return struct.unpack("!I", routing_id[1:])[0] if is_ours else 1 << 32

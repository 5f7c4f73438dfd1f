"""Publishes the events of an engine core's KV cache over ZeroMQ, see `replay_protocol.py`.

    core's thread ── encoded batch, inproc ──> publisher thread ── PUB ──> subscribers
                                                                └─ ROUTER ── missed batches, snapshots

The core encodes a batch and goes on. The thread sends it, keeps the last batches, and applies them to an index of its
own, from which it answers requests for a snapshot. Without events and requests it sleeps in the kernel.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq

from mvllm.config.kv_events import KVEventsConfig, endpoint_of_rank
from mvllm.errors import ConfigError
from mvllm.kv_events.block_index import KVBlockIndex
from mvllm.kv_events.replay_protocol import END, MAX_BLOCKS_PER_BATCH, SNAPSHOT, TOO_OLD, number_bytes
from mvllm.logging import get_logger
from mvllm.messages.kv_events import AllBlocksCleared, KVCacheEvent, KVEventBatch

logger = get_logger(__name__)

_LINGER_MS = 500  # how long the last batches may take to reach subscribers
_JOIN_SECONDS = 2.0
_MAX_PENDING_REPLIES = 100_000  # messages that a slow client may leave unread before its replies are dropped


class KVEventPublisher:
    """The publisher of one engine core. `publish` and `close` are called from the core's thread.

    Args:
        config: Where to publish.
        rank: The replica's rank: its ports are this much higher.

    Raises:
        ConfigError: An address cannot be bound.

    Attributes:
        publisher: The number that all batches have.
    """

    def __init__(self, config: KVEventsConfig, rank: int = 0) -> None:
        self.publisher = secrets.randbits(62) + 1
        self._rank = rank
        self._context = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        address = f"inproc://kv-events-{self.publisher}"
        try:
            self._batches: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
            self._batches.set_hwm(0)
            self._batches.bind(address)
            pub: zmq.Socket[bytes] = self._context.socket(zmq.PUB)
            pub.set_hwm(config.hwm)
            pub.linger = _LINGER_MS
            _bind(pub, "endpoint", endpoint_of_rank(config.endpoint, rank))
            router: zmq.Socket[bytes] | None = None
            if config.replay_endpoint:
                router = self._context.socket(zmq.ROUTER)
                router.set_hwm(_MAX_PENDING_REPLIES)
                router.linger = 0
                _bind(router, "replay_endpoint", endpoint_of_rank(config.replay_endpoint, rank))
        except BaseException:
            self._context.destroy(linger=0)
            raise
        batches: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        batches.set_hwm(0)
        batches.connect(address)
        sender = _Sender(config, self.publisher, rank, batches, pub, router)
        self._thread = threading.Thread(target=sender.run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[KVCacheEvent]) -> None:
        """Publishes the events of one step as one batch. Never waits for subscribers."""
        batch = KVEventBatch(time.time(), list(events), self._rank, self.publisher)
        self._send_to_thread(self._encoder.encode(batch))

    def close(self) -> None:
        """Ends the thread and closes the sockets. Idempotent."""
        if self._batches.closed:
            return
        self._send_to_thread(b"")
        self._thread.join(_JOIN_SECONDS)
        self._batches.close(linger=0)
        if not self._thread.is_alive():
            self._context.term()

    def _send_to_thread(self, payload: bytes) -> None:
        with contextlib.suppress(zmq.Again):  # the thread has failed, and has logged why
            self._batches.send(payload, zmq.NOBLOCK)


class _Sender:
    """The publisher thread: owns the sockets to subscribers."""

    def __init__(
        self,
        config: KVEventsConfig,
        publisher: int,
        rank: int,
        batches: zmq.Socket[bytes],
        pub: zmq.Socket[bytes],
        router: zmq.Socket[bytes] | None,
    ) -> None:
        self._topic = config.topic.encode()
        self._publisher, self._rank = publisher, rank
        self._batches, self._pub, self._router = batches, pub, router
        self._next_number = 0
        self._kept: deque[bytes] = deque(maxlen=config.buffer_steps)  # the last batches
        self._index = KVBlockIndex()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)

    def run(self) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._batches, zmq.POLLIN)
            if self._router is not None:
                poller.register(self._router, zmq.POLLIN)
            while True:
                ready = dict(poller.poll())
                if self._batches in ready:
                    payload = self._batches.recv()
                    if not payload:
                        return
                    self._send(payload)
                elif self._router is not None and self._router in ready:
                    self._answer(self._router, self._router.recv_multipart())
        except Exception as e:
            logger.exception("KV cache events are no longer published: %s", e)
        finally:
            for socket in (self._batches, self._pub, self._router):
                if socket is not None:
                    socket.close()

    def _send(self, payload: bytes) -> None:
        self._pub.send_multipart((self._topic, number_bytes(self._next_number), payload))
        self._next_number += 1
        if self._router is not None:
            self._kept.append(payload)
            self._index.apply(self._decoder.decode(payload).events)

    def _answer(self, router: zmq.Socket[bytes], frames: list[bytes]) -> None:
        """Answers a request; one that cannot be understood gets an END."""
        client, *request = frames
        if request and not request[0]:
            request = request[1:]

        def reply(number: bytes, payload: bytes = b"") -> None:
            router.send_multipart((client, b"", number, payload))  # dropped, if the client has gone or does not read

        if request == [SNAPSHOT]:
            last = number_bytes(self._next_number - 1) if self._next_number else END
            for payload in self._snapshot():
                reply(last, payload)
            reply(END)
            return
        if not request or len(request[0]) != 8:
            reply(END)
            return
        start = int.from_bytes(request[0], "big")
        oldest = self._next_number - len(self._kept)
        is_other = len(request) > 1 and request[1] != number_bytes(self._publisher)
        if is_other or not oldest <= start <= self._next_number:
            reply(TOO_OLD)
            return
        for number, payload in enumerate(self._kept, start=oldest):
            if number >= start:
                reply(number_bytes(number), payload)
        reply(END)

    def _snapshot(self) -> list[bytes]:
        now = time.time()
        parts: list[list[KVCacheEvent]] = [[AllBlocksCleared()], *self._index.as_events(MAX_BLOCKS_PER_BATCH)]
        return [self._encoder.encode(KVEventBatch(now, part, self._rank, self._publisher)) for part in parts]


def _bind(socket: zmq.Socket[bytes], name: str, address: str) -> None:
    try:
        socket.bind(address)
    except zmq.ZMQError as e:
        raise ConfigError(
            f"kv_events_config: {name} {address} cannot be bound ({e}). Choose another address, or end the program "
            "that uses it."
        ) from e

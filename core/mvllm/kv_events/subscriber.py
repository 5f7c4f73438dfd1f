"""A subscriber to an engine's KV cache events, with an index of the cache that is exact also after missed batches.

    subscriber = KVEventSubscriber("tcp://host:5557", "tcp://host:5558")
    while True:
        subscriber.poll(1.0)
        print(len(subscriber.index.blocks), "blocks are cached")

It begins with a snapshot. When a number is missing it asks for the missed batches; when these are not kept any more, or
the engine has been restarted, it takes a snapshot again. When nothing arrives for a while it asks whether something was
missed, so that the index is right also behind a lost last batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq

from mvllm.errors import MvllmError
from mvllm.kv_events.block_index import KVBlockIndex
from mvllm.kv_events.replay_protocol import SNAPSHOT, TOO_OLD, number_bytes
from mvllm.logging import get_logger
from mvllm.messages.kv_events import KVCacheEvent, KVEventBatch

logger = get_logger(__name__)

_HWM = 1_000_000


class KVEventSubscriber:
    """The events of one engine core. Used from one thread.

    Args:
        endpoint: Its `endpoint`, with a host that can be reached; with the rank added to the port for a replica.
        replay_endpoint: Its `replay_endpoint` likewise; None for none. Then the index is what the events since the
            connection say, which is less than the cache holds, and may be wrong after a missed batch.
        topic: Its `topic`.
        on_events: Called with the events that are applied to the index, in their order. A snapshot begins with
            AllBlocksCleared.
        check_seconds: After this time without a batch it asks whether it has missed one.
        reply_seconds: The longest wait for an answer of `replay_endpoint`.

    Attributes:
        index: The blocks of the cache.
        is_exact: Whether `index` was the cache's at the batch that was applied last.
        next_number: The number of the next batch; 0 before the first.
        num_snapshots, num_replayed: Snapshots taken, and missed batches that were sent again.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        on_events: Callable[[Sequence[KVCacheEvent]], None] = lambda events: None,
        check_seconds: float = 1.0,
        reply_seconds: float = 5.0,
    ) -> None:
        self.index = KVBlockIndex()
        self.is_exact = False
        self.next_number = 0
        self.num_snapshots = self.num_replayed = 0
        self._publisher: int | None = None
        self._on_events = on_events
        self._check_seconds, self._reply_seconds = check_seconds, reply_seconds
        self._replay_endpoint = replay_endpoint
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._context = zmq.Context()
        self._sub: zmq.Socket[bytes] = self._context.socket(zmq.SUB)
        self._sub.set_hwm(_HWM)
        self._sub.subscribe(topic.encode())
        self._sub.connect(endpoint)
        self._replay: zmq.Socket[bytes] | None = None
        self._checked_at = 0.0  # a check is due: it takes the first snapshot

    def poll(self, seconds: float) -> int:
        """Waits for batches and applies all that have arrived.

        Args:
            seconds: The longest wait for the first one. Requests to `replay_endpoint` may take longer.

        Returns:
            Batches applied.

        Raises:
            MvllmError: `replay_endpoint` does not answer. The call may be repeated.
        """
        if self._publisher is None and self._replay_endpoint is not None:
            return self._take_snapshot()
        deadline, applied = time.monotonic() + seconds, 0
        while True:
            left = max(0.0, min(deadline, self._next_check()) - time.monotonic())
            if self._sub.poll(0 if applied else math.ceil(left * 1000)):
                applied += self._receive()
                self._checked_at = time.monotonic()
            elif applied or time.monotonic() >= deadline:
                return applied
            elif time.monotonic() >= self._next_check():
                applied += self._catch_up()
                if applied:
                    return applied

    def close(self) -> None:
        """Closes the sockets. Idempotent."""
        self._context.destroy(linger=0)

    def _next_check(self) -> float:
        return float("inf") if self._replay_endpoint is None else self._checked_at + self._check_seconds

    def _receive(self) -> int:
        """Applies the batch that has arrived, after those before it; returns how many."""
        frames = self._sub.recv_multipart()
        if len(frames) != 3:
            logger.warning("Dropped a message of %d frames, which is no batch of KV cache events.", len(frames))
            return 0
        number, batch = int.from_bytes(frames[1], "big"), self._decoder.decode(frames[2])
        if self._replay_endpoint is None:
            self.is_exact = number == 0 or (self.is_exact and number == self.next_number)
            self._publisher = batch.publisher
            self._apply(number, batch)
            return 1
        if batch.publisher == self._publisher and number < self.next_number:
            return 0  # was in a snapshot or a replay
        if batch.publisher == self._publisher and number == self.next_number:
            self._apply(number, batch)
            return 1
        return self._catch_up()  # it contains this batch

    def _apply(self, number: int, batch: KVEventBatch) -> None:
        self.index.apply(batch.events)
        self.next_number = number + 1
        self._on_events(batch.events)

    def _catch_up(self) -> int:
        """Applies the batches that were missed, or takes a snapshot; returns how many batches were applied."""
        assert self._publisher is not None
        self._checked_at = time.monotonic()
        applied = 0
        for number_frame, payload in self._request(number_bytes(self.next_number), number_bytes(self._publisher)):
            number = int.from_bytes(number_frame, "big")
            if number_frame == TOO_OLD or number != self.next_number:
                return applied + self._take_snapshot()
            self._apply(number, self._decoder.decode(payload))
            applied += 1
        self.num_replayed += applied
        return applied

    def _take_snapshot(self) -> int:
        self._checked_at = time.monotonic()
        self.is_exact = False
        parts = self._request(SNAPSHOT)
        for number_frame, payload in parts:
            batch = self._decoder.decode(payload)
            self._publisher = batch.publisher
            self._apply(int.from_bytes(number_frame, "big", signed=True), batch)
        self.is_exact = True
        self.num_snapshots += 1
        return len(parts)

    def _request(self, *frames: bytes) -> list[tuple[bytes, bytes]]:
        """Sends a request, and returns the (number, payload) frames of the answer; TOO_OLD alone, if that is it."""
        if self._replay is None:
            self._replay = self._context.socket(zmq.DEALER)
            self._replay.set_hwm(0)
            assert self._replay_endpoint is not None
            self._replay.connect(self._replay_endpoint)
        self._replay.send_multipart((b"", *frames))
        deadline = time.monotonic() + self._reply_seconds
        answer: list[tuple[bytes, bytes]] = []
        while True:
            if not self._replay.poll(math.ceil(max(0.0, deadline - time.monotonic()) * 1000)):
                self._replay.close(linger=0)  # with it goes what may still arrive of this answer
                self._replay = None
                raise MvllmError(
                    f"{self._replay_endpoint} does not answer within {self._reply_seconds:g} s. Does the engine run "
                    "with this replay_endpoint in its kv_events_config?"
                )
            _, number, payload = self._replay.recv_multipart()
            if number == TOO_OLD:
                return [(number, payload)]
            if not payload:
                return answer
            answer.append((number, payload))

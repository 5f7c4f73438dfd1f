"""RingWriter, the writing end of a ring: waits for free slots and fills them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from mvllm.executor.message_queue.errors import QueueTimeoutError
from mvllm.executor.message_queue.notifier import Notifier, StopSignal
from mvllm.executor.message_queue.peers import Peer, describe_all
from mvllm.executor.message_queue.ring_buffer import WRITER, ShmRingBuffer
from mvllm.executor.message_queue.waiter import Waiter

INLINE = 0  # the slot holds the message
OVERFLOW = 1  # the slot announces a message on the overflow socket


class RingWriter:
    """Fills slots in order. Used from one thread; only one may ever exist per ring.

    Args:
        name: The queue's name, for errors.
        ring: The memory.
        items: Per reader, the tokens for messages that it may read.
        space: Per reader, the tokens for messages that it has released.
        reader_names: For errors.
        stop: Ends every wait, or None.
    """

    def __init__(
        self,
        name: str,
        ring: ShmRingBuffer,
        items: Sequence[Notifier],
        space: Sequence[Notifier],
        reader_names: Sequence[str],
        stop: StopSignal | None = None,
    ) -> None:
        self._name = name
        self._ring = ring
        self._items = items
        self._space = space
        self._num_slots = ring.num_slots
        self._next = 1  # sequence number of the next message
        self._limit = ring.num_slots  # the highest that may be written with the tokens taken
        self._released = [0] * len(items)  # per reader, the number of `space` tokens taken
        self.peers = [_reader_peer(ring, index, reader) for index, reader in enumerate(reader_names)]
        self._waiter = Waiter(name, self.peers, stop)
        for notifier in space:
            self._waiter.add(notifier.read_fd)
        self._active_items = list(items)  # of the readers that are not dropped
        ring.set_pid(WRITER, os.getpid())

    @property
    def sequence(self) -> int:
        """The number of the next message."""
        return self._next

    def wait_for_slot(self, deadline: float | None) -> None:
        """Returns when the next slot is free: every reader has released its last message.

        Raises:
            QueueTimeoutError: The deadline passed; the message names the readers that are behind.
            PeerDiedError: A reader has ended.
            QueueStoppedError: The stop signal was set.
        """
        if self._next <= self._limit:
            return
        self._reserve_space()
        while self._next > self._limit:
            if not self._waiter.wait(deadline, f"a free slot (message {self._next})"):
                raise self._timeout()
            self._reserve_space()

    def write(self, frames: Sequence[bytes | memoryview], num_bytes: int, kind: int = INLINE) -> None:
        """Fills the free slot and notifies every reader. Call `wait_for_slot` first.

        Args:
            frames: The frames to pack into it; none for kind OVERFLOW.
            num_bytes: `packed_bytes(frames)`, at most `slot_bytes`.
        """
        assert self._next <= self._limit
        sequence = self._next
        if frames:
            self._ring.fill(sequence, frames)
        self._ring.publish(sequence, num_bytes, kind)
        self._next = sequence + 1
        for notifier in self._active_items:
            notifier.notify()

    def drop_reader(self, index: int) -> None:
        """Removes a reader: it receives no more messages and no wait depends on it. It cannot attach again."""
        peer = self.peers[index]
        if not peer.is_dropped:
            peer.drop()
            self._active_items.remove(self._items[index])
            self._waiter.remove(self._space[index].read_fd)
            self._update_limit()

    def close(self) -> None:
        """Idempotent."""
        for peer in self.peers:
            peer.forget_fd()
        for notifier in (*self._items, *self._space):
            notifier.close()
        self._ring.close()

    def _reserve_space(self) -> None:
        for index, notifier in enumerate(self._space):
            if not self.peers[index].is_dropped:
                self._released[index] += notifier.drain()
        self._update_limit()

    def _update_limit(self) -> None:
        released = [count for count, peer in zip(self._released, self.peers) if not peer.is_dropped]
        self._limit = min(released, default=self._next) + self._num_slots

    def _timeout(self) -> QueueTimeoutError:
        oldest = self._next - self._num_slots
        behind = [p for p, count in zip(self.peers, self._released) if count < oldest and not p.is_dropped]
        return QueueTimeoutError(
            f"Queue {self._name}: no free slot for message {self._next} in time. Message {oldest} was not released by "
            f"{describe_all(behind)}. All {self._num_slots} slots are in use."
        )


def _reader_peer(ring: ShmRingBuffer, index: int, name: str) -> Peer:
    return Peer(name, index, lambda: ring.pid(1 + index))

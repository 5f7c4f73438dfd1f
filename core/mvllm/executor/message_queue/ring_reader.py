"""RingReader, a reading end of a ring: waits for messages and releases slots."""

from __future__ import annotations

import os

from mvllm.executor.message_queue.errors import QueueTimeoutError
from mvllm.executor.message_queue.notifier import Notifier, StopSignal
from mvllm.executor.message_queue.peers import Peer
from mvllm.executor.message_queue.ring_buffer import WRITER, ShmRingBuffer
from mvllm.executor.message_queue.waiter import AdaptiveSpin, Waiter


class RingReader:
    """Reads slots in order, in place. Used from one thread; only one may ever exist per reader index.

    Args:
        name: The queue's name, for errors.
        ring: The memory.
        index: The index of the reader.
        items: The tokens for messages that may be read.
        space: The tokens for messages that were released.
        writer_name: For errors.
        spin_seconds: Longest spin before a sleep.
        stop: Ends every wait, or None.
    """

    def __init__(
        self,
        name: str,
        ring: ShmRingBuffer,
        index: int,
        items: Notifier,
        space: Notifier,
        writer_name: str,
        spin_seconds: float,
        stop: StopSignal | None = None,
    ) -> None:
        self._name = name
        self._ring = ring
        self._party = 1 + index
        self._items = items
        self._space = space
        self._tokens = 0
        self._next = 1
        self._spin = AdaptiveSpin(spin_seconds)
        self.peer = Peer(writer_name, None, lambda: ring.pid(WRITER))
        self.waiter = Waiter(name, [self.peer], stop)
        self.waiter.add(items.read_fd)
        ring.set_pid(self._party, os.getpid())

    @property
    def sequence(self) -> int:
        """The number of the next message."""
        return self._next

    @property
    def fd(self) -> int:
        """Readable while there are tokens that this end has not taken."""
        return self._items.read_fd

    def has_message(self) -> bool:
        """Whether `wait_for_message` would return at once."""
        if not self._tokens:
            self._tokens = self._items.drain()
        return self._tokens > 0

    def wait_for_message(self, deadline: float | None) -> None:
        """Returns when the next message may be read.

        Raises:
            QueueTimeoutError: The deadline passed.
            PeerDiedError: The writer has ended, and all its messages have been read.
            QueueStoppedError: The stop signal was set.
        """
        if self._tokens:
            return
        if self._spin.spin(self.hint):
            self._tokens = self._items.drain()
        while not self._tokens:
            if not self.waiter.wait(deadline, f"message {self._next}"):
                raise QueueTimeoutError(
                    f"Queue {self._name}: message {self._next} did not come in time from {self.peer.describe()}."
                )
            self._tokens = self._items.drain()
        self._spin.ended()

    def current(self) -> tuple[memoryview, int]:
        """(payload in place, kind) of the next message. Call `wait_for_message` first; valid until `release`."""
        assert self._tokens
        length, kind = self._ring.label(self._next)
        return self._ring.payload(self._next, length), kind

    def release(self) -> None:
        """Frees the slot of the current message for the writer."""
        self._ring.set_count(self._party, self._next)
        self._next += 1
        self._tokens -= 1
        self._space.notify()

    def close(self) -> None:
        """Idempotent."""
        self.peer.forget_fd()
        self._items.close()
        self._space.close()
        self._ring.close()

    def hint(self) -> bool:
        """Whether the next message seems to be published; only a hint."""
        return self._ring.hint(self._next)

"""MessageReader, the receiving end of a queue, and ReaderGroup, one wait for several readers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import msgspec

from mvllm.executor.message_queue import frames as framing
from mvllm.executor.message_queue.errors import QueueClosedError, QueueError, QueueTimeoutError
from mvllm.executor.message_queue.handles import ReaderHandle, RemoteReaderHandle
from mvllm.executor.message_queue.notifier import StopSignal, open_notifier
from mvllm.executor.message_queue.peers import Peer
from mvllm.executor.message_queue.ring_buffer import ShmRingBuffer
from mvllm.executor.message_queue.ring_reader import RingReader
from mvllm.executor.message_queue.ring_writer import OVERFLOW
from mvllm.executor.message_queue.shared_segment import SharedSegment
from mvllm.executor.message_queue.waiter import AdaptiveSpin, Waiter, deadline_after

if TYPE_CHECKING:  # loads ZeroMQ, which few queues need
    from mvllm.executor.message_queue.overflow_socket import OverflowReceiver

T = TypeVar("T")


class MessageSource(Protocol):
    """Source of a reader's frames: the ring of this machine, or a socket.

    Attributes:
        name: The queue's name.
        in_place: Whether the last received frames are views of a slot, which `release` frees.
        fds: Readable when there may be a message.
        peers: Local processes whose death ends a wait.
    """

    @property
    def name(self) -> str: ...
    @property
    def in_place(self) -> bool: ...
    @property
    def fds(self) -> Sequence[int]: ...
    @property
    def peers(self) -> Sequence[Peer]: ...
    @property
    def sequence(self) -> int: ...

    def has_message(self) -> bool: ...
    def hint(self) -> bool: ...
    def receive(self, deadline: float | None) -> list[memoryview]:
        """The frames of the next message; the same message again until `release` is called."""
        ...

    def release(self) -> None: ...
    def close(self) -> None: ...


class LocalSource:
    """Receives from the ring, and from the overflow socket where a slot announces a large message."""

    def __init__(self, handle: ReaderHandle, stop: StopSignal | None) -> None:
        self.name = handle.queue
        self.in_place = False
        self._handle = handle
        self._stop = stop
        self._in = RingReader(
            handle.queue,
            ShmRingBuffer(SharedSegment(handle.segment)),
            handle.index,
            open_notifier(handle.items),
            open_notifier(handle.space),
            handle.writer,
            handle.spin_seconds,
            stop,
        )
        self.fds = (self._in.fd,)
        self.peers = (self._in.peer,)
        self.has_message = self._in.has_message
        self.hint = self._in.hint
        self.release = self._in.release
        self._overflow: OverflowReceiver | None = None

    @property
    def sequence(self) -> int:
        return self._in.sequence

    def receive(self, deadline: float | None) -> list[memoryview]:
        self._in.wait_for_message(deadline)
        payload, kind = self._in.current()
        self.in_place = kind != OVERFLOW
        if self.in_place:
            return framing.unpack(payload)
        return self._open_overflow().receive(self._in.sequence, deadline)

    def close(self) -> None:
        if self._overflow is not None:
            self._overflow.close()
        self._in.close()

    def _open_overflow(self) -> OverflowReceiver:
        if self._overflow is None:
            from mvllm.executor.message_queue.overflow_socket import OverflowReceiver

            self._overflow = OverflowReceiver(
                self.name, self._handle.overflow, self._handle.token, self._in.peer, self._stop
            )
        return self._overflow


class MessageReader(Generic[T]):
    """Receives every message of a queue, in order. Used from one thread.

    Built by `attach`, or by MessageQueue.open_reader in the process that created the queue.
    """

    def __init__(self, source: MessageSource, decode: Callable[[memoryview], T]) -> None:
        self.source = source
        self.name = source.name
        self._decode = decode
        self._is_closed = False

    @classmethod
    def attach(
        cls, handle: ReaderHandle | RemoteReaderHandle, message_type: type[T], stop: StopSignal | None = None
    ) -> MessageReader[T]:
        """Takes over the handle's descriptors, or connects to the writer's machine.

        Args:
            message_type: What every message is decoded as; msgspec refuses anything else.
        """
        source: MessageSource
        if isinstance(handle, RemoteReaderHandle):
            from mvllm.executor.message_queue.tcp_transport import RemoteSource

            source = RemoteSource(handle, stop)
        else:
            source = LocalSource(handle, stop)
        return cls(source, msgspec.msgpack.Decoder(message_type).decode)

    def dequeue(self, timeout: float | None = None) -> tuple[T, list[memoryview]]:
        """The next message and its buffers, copied out of the slot.

        Args:
            timeout: Seconds to wait for it, or None for no limit.

        Raises:
            QueueTimeoutError: It was not received in time.
            PeerDiedError: The writer has ended, and all its messages have been read.
            QueueStoppedError: The stop signal was set while waiting.
            QueueClosedError: This end is closed.
            QueueError: The message's type keeps a view of the slot, which has been freed.
            msgspec.ValidationError: It is not of this reader's message type. It counts as read.
        """
        if self._is_closed:
            raise self._closed()
        frames = self.source.receive(deadline_after(timeout))
        try:
            message = self._decode(frames[0])
            buffers = frames[1:]
            if buffers and self.source.in_place:
                buffers = [memoryview(bytes(buffer)) for buffer in buffers]
        except BaseException:
            self._release(frames)
            raise
        if self._release(frames):
            raise self._still_in_use()
        return message, buffers

    def has_message(self) -> bool:
        """Whether `dequeue` would return at once."""
        return not self._is_closed and self.source.has_message()

    def close(self) -> None:
        """Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self.source.close()

    def _release(self, frames: list[memoryview]) -> bool:
        """Frees the slot of the frames; returns whether an object still refers to it."""
        is_used = False
        if self.source.in_place:
            slot = frames[0].obj
            for frame in frames:
                try:
                    frame.release()
                except BufferError:
                    is_used = True
            is_used = is_used or sys.getrefcount(slot) > 2  # this variable, and the argument of getrefcount
        self.source.release()
        return is_used

    def _closed(self) -> QueueClosedError:
        return QueueClosedError(f"Queue {self.name}: this reader was closed; nothing can be read any more.")

    def _still_in_use(self) -> QueueError:
        return QueueError(
            f"Queue {self.name}: a buffer of message {self.source.sequence - 1} is still in use after the message was "
            "decoded: its type keeps a view of the slot, as msgspec.Raw does. Copy it."
        )


class ReaderGroup(Generic[T]):
    """Waits for several readers at once, for instance the replies of all workers. Used from one thread.

    Args:
        readers: The readers, which the caller closes after the last use of the group.
        stop: Ends every wait, or None.
        spin_seconds: Longest spin before a sleep; 0 for none.
    """

    def __init__(
        self, readers: Sequence[MessageReader[T]], stop: StopSignal | None = None, spin_seconds: float = 100e-6
    ) -> None:
        self._readers = list(readers)
        self._spin = AdaptiveSpin(spin_seconds)
        self._name = ", ".join(reader.name for reader in readers)
        self._waiter = Waiter(self._name, [peer for reader in readers for peer in reader.source.peers], stop)
        for reader in readers:
            for fd in reader.source.fds:
                self._waiter.add(fd)

    def wait(self, timeout: float | None = None) -> list[MessageReader[T]]:
        """The readers that have a message; at least one.

        Raises:
            QueueTimeoutError, PeerDiedError, QueueStoppedError: As MessageReader.dequeue, if no reader has a message.
        """
        deadline = deadline_after(timeout)
        self._spin.spin(self._hint)
        while not (ready := [reader for reader in self._readers if reader.has_message()]):
            if not self._waiter.wait(deadline, "a message"):
                raise QueueTimeoutError(f"Queues {self._name}: no message came in time.")
        self._spin.ended()
        return ready

    def _hint(self) -> bool:
        return any(reader.source.hint() for reader in self._readers)

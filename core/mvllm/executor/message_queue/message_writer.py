"""MessageWriter, the sending end of a queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from mvllm.executor.message_queue import frames as framing
from mvllm.executor.message_queue.errors import QueueClosedError
from mvllm.executor.message_queue.handles import WriterHandle
from mvllm.executor.message_queue.notifier import StopSignal, open_notifier
from mvllm.executor.message_queue.ring_buffer import ShmRingBuffer
from mvllm.executor.message_queue.ring_writer import OVERFLOW, RingWriter
from mvllm.executor.message_queue.shared_segment import SharedSegment
from mvllm.executor.message_queue.waiter import deadline_after

if TYPE_CHECKING:  # these load ZeroMQ, which few queues need
    from mvllm.executor.message_queue.overflow_socket import OverflowSender
    from mvllm.executor.message_queue.tcp_transport import RemoteSender


class MessageWriter:
    """Sends messages to every reader of a queue. Used from one thread.

    Built by `attach`, or by MessageQueue.open_writer in the process that created the queue.
    """

    def __init__(self, handle: WriterHandle, stop: StopSignal | None, remote: RemoteSender | None) -> None:
        self.name = handle.queue
        self._handle = handle
        self._ring = ShmRingBuffer(SharedSegment(handle.segment))
        self._slot_bytes = self._ring.slot_bytes
        self._out = RingWriter(
            handle.queue,
            self._ring,
            [open_notifier(pair) for pair in handle.items],
            [open_notifier(pair) for pair in handle.space],
            handle.readers,
            stop,
        )
        self._encode = msgspec.msgpack.Encoder().encode
        self._overflow: OverflowSender | None = None
        self._remote = remote
        if remote is not None:
            remote.use_stop(stop)
        self._is_closed = False

    @classmethod
    def attach(cls, handle: WriterHandle, stop: StopSignal | None = None) -> MessageWriter:
        """Takes over the handle's descriptors."""
        return cls(handle, stop, None)

    def enqueue(self, message: object, buffers: Sequence[object] = (), timeout: float | None = None) -> None:
        """Sends one message to every reader, or to none.

        Args:
            message: Any value that msgspec encodes: structs, dicts, lists, numbers, text.
            buffers: Contiguous buffers (bytes, arrays) to send with it, copied once into the slot. They may be
                changed as soon as this returns.
            timeout: Seconds to wait for a free slot, or None for no limit.

        Raises:
            QueueTimeoutError: No slot was free in time; the message names the readers that are behind.
            PeerDiedError: A reader has ended. `drop_reader` continues without it.
            QueueStoppedError: The stop signal was set while waiting.
            QueueClosedError: This end is closed.
        """
        if self._is_closed:
            raise QueueClosedError(f"Queue {self.name}: its writer was closed; nothing can be sent any more.")
        # msgspec can encode in place only into a bytearray, never into shared memory: so bytes, then one copy.
        frames = [self._encode(message), *map(framing.as_frame, buffers)]
        num_bytes = framing.packed_bytes(frames)
        deadline = deadline_after(timeout)
        if self._remote is not None:
            self._remote.wait_for_credit(self._out.sequence, deadline)
        self._out.wait_for_slot(deadline)
        if self._remote is not None:
            self._remote.send(self._out.sequence, frames)
        if num_bytes <= self._slot_bytes:
            self._out.write(frames, num_bytes)
        else:
            self._send_overflow(frames)

    def drop_reader(self, index: int, *, remote: bool = False) -> None:
        """Removes a reader that has ended.

        Args:
            remote: Whether `index` is an index among the remote readers.
        """
        if remote:
            if self._remote is not None:
                self._remote.drop_reader(index)
            return
        self._out.drop_reader(index)
        if self._overflow is not None:
            self._overflow.drop_reader(index)

    def close(self) -> None:
        """Closes this end, after up to 2 s for large messages that readers have not received yet. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._overflow is not None:
            self._overflow.close()
        if self._remote is not None:
            self._remote.close()
        self._out.close()

    def _send_overflow(self, frames: Sequence[bytes | memoryview]) -> None:
        if self._handle.overflow:
            self._open_overflow().send(self._out.sequence, frames)
        self._out.write((), 0, OVERFLOW)

    def _open_overflow(self) -> OverflowSender:
        if self._overflow is None:
            from mvllm.executor.message_queue.overflow_socket import OverflowSender

            self._overflow = OverflowSender(self._handle.overflow, self._handle.token)
            for index, peer in enumerate(self._out.peers):
                if peer.is_dropped:
                    self._overflow.drop_reader(index)
        return self._overflow

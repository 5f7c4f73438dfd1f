"""MessageQueue: typed messages from one process to several.

    creator    queue = MessageQueue.create("rpc_broadcast", ["Worker_TP0", "Worker_TP1"])
               start children with queue.writer_handle(), queue.reader_handle(0), ...; then queue.close()
    writer     writer = MessageWriter.attach(handle)                   or queue.open_writer() in the creator itself
               writer.enqueue(message, buffers=[array], timeout=10)
    reader     reader = MessageReader.attach(handle, SchedulerOutput)
               message, buffers = reader.dequeue()

A message that fits a slot is written into it. A larger one is announced by a slot and sent through the overflow socket.
Readers on other machines receive both kinds over TCP.

An end is used from one thread of the process that attached it. To end a wait from another thread or a signal handler,
set its StopSignal. A signal handler that raises is safe only while the end waits.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from mvllm.errors import ConfigError
from mvllm.executor.message_queue import frames as framing
from mvllm.executor.message_queue.handles import ReaderHandle, RemoteReaderHandle, WriterHandle
from mvllm.executor.message_queue.ipc_sockets import make_ipc_prefix
from mvllm.executor.message_queue.message_reader import MessageReader
from mvllm.executor.message_queue.message_writer import MessageWriter
from mvllm.executor.message_queue.notifier import Notifier, StopSignal, make_notifier
from mvllm.executor.message_queue.ring_buffer import RingShape, ShmRingBuffer

if TYPE_CHECKING:  # loads ZeroMQ, which few queues need
    from mvllm.executor.message_queue.tcp_transport import RemoteSender

T = TypeVar("T")


class QueueSettings(msgspec.Struct, frozen=True):
    """The sizes of a queue.

    Attributes:
        num_slots: The number of messages that may be unread at once.
        slot_bytes: The largest packed message that is sent through shared memory.
        spin_seconds: The longest spin of a reader before it sleeps; 0 for none. See AdaptiveSpin.
        directory: A memory file system for the ring, or None for anonymous memory (see SharedSegment.create).
    """

    num_slots: int = 10
    slot_bytes: int = 1 << 20
    spin_seconds: float = 100e-6
    directory: str | None = None

    def shape(self, num_readers: int) -> RingShape:
        """The ring of a queue with `num_readers` local readers, for `plan_rings`."""
        return RingShape(num_readers, self.num_slots, self.slot_bytes if num_readers else framing.ALIGNMENT)


class MessageQueue:
    """A queue with all its descriptors. Close it when all child processes have started.

    Build with `create`.
    """

    def __init__(
        self,
        ring: ShmRingBuffer,
        notifiers: Sequence[Notifier],
        writer: WriterHandle,
        readers: Sequence[ReaderHandle],
        remote: RemoteSender | None,
    ) -> None:
        self.name = writer.queue
        self._ring = ring
        self._notifiers = notifiers
        self._writer = writer
        self._readers = readers
        self._remote = remote

    @classmethod
    def create(
        cls,
        name: str,
        readers: Sequence[str],
        *,
        writer: str = "writer",
        settings: QueueSettings | None = None,
        remote_readers: Sequence[str] = (),
        host: str | None = None,
    ) -> MessageQueue:
        """A new queue.

        Args:
            name: For errors and logs.
            readers: A name for each reader on this machine, in order of their index.
            writer: A name for the writer.
            settings: Sizes; plan them with `plan_rings` when an engine has several queues.
            remote_readers: A name for each reader on another machine. With any, the creator has to be the writer.
            host: This machine's address for them.

        Raises:
            SharedMemoryError: There is not enough shared memory.
            ConfigError: The settings are out of range.
        """
        settings = settings or QueueSettings()
        if bool(remote_readers) != (host is not None):
            raise ConfigError(f"The queue {name!r}: remote_readers and host go together; one of them was not given.")
        remote = None
        if host is not None:
            from mvllm.executor.message_queue.tcp_transport import RemoteSender

            remote = RemoteSender(name, writer, remote_readers, settings.num_slots, host)
        ring = ShmRingBuffer.create(settings.shape(len(readers)), name, settings.directory)
        items = [make_notifier() for _ in readers]
        space = [make_notifier() for _ in readers]
        prefix = make_ipc_prefix()
        addresses = tuple(f"{prefix}{index}" for index in range(len(readers)))
        shared: dict[str, Any] = {
            "queue": name,
            "segment": ring.segment.fd,
            "token": secrets.token_bytes(16),
            "spin_seconds": settings.spin_seconds,
        }
        writer_handle = WriterHandle(
            **shared,
            items=tuple(notifier.fds for notifier in items),
            space=tuple(notifier.fds for notifier in space),
            readers=tuple(readers),
            overflow=addresses,
        )
        reader_handles = [
            ReaderHandle(
                **shared, index=i, items=items[i].fds, space=space[i].fds, writer=writer, overflow=addresses[i]
            )
            for i in range(len(readers))
        ]
        return cls(ring, [*items, *space], writer_handle, reader_handles, remote)

    def writer_handle(self) -> WriterHandle:
        """The handle for the writing process, which must be one only; valid until `close`.

        Raises:
            ConfigError: The queue has remote readers, whose connections end in this process.
        """
        if self._remote is not None:
            raise ConfigError(
                f"The queue {self.name!r} has remote readers, so the process that created it has to write it: use "
                "open_writer, or create the queue in the process that writes."
            )
        return self._writer

    def reader_handle(self, index: int) -> ReaderHandle:
        """The handle for reader `index`; valid until `close`."""
        return self._readers[index]

    def remote_reader_handle(self, index: int) -> RemoteReaderHandle:
        """The handle for remote reader `index`, counted among the remote readers."""
        if self._remote is None:
            raise ConfigError(f"The queue {self.name!r} was created without remote readers.")
        return self._remote.handle(index)

    def open_writer(self, stop: StopSignal | None = None) -> MessageWriter:
        """The writing end, in this process. It stays open after `close` of the queue."""
        remote, self._remote = self._remote, None
        return MessageWriter(self._writer.duplicated(), stop, remote)

    def open_reader(self, index: int, message_type: type[T], stop: StopSignal | None = None) -> MessageReader[T]:
        """A reading end, in this process. It stays open after `close` of the queue."""
        return MessageReader.attach(self._readers[index].duplicated(), message_type, stop)

    def close(self) -> None:
        """Closes the descriptors of the queue; attached ends stay open. Idempotent."""
        if self._remote is not None:
            self._remote.close()
            self._remote = None
        for notifier in self._notifiers:
            notifier.close()
        self._ring.close()

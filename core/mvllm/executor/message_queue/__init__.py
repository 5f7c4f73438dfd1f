"""Messages from one process to several: shared memory, a wake-up per reader, sockets for what is large or far.

    MessageQueue        creates a queue and hands out its ends            queue.py
      MessageWriter     enqueue                                           message_writer.py
      MessageReader     dequeue, acquire_read; ReaderGroup for several    message_reader.py
    RingWriter/Reader   who may touch which slot, and the waits           ring_writer.py, ring_reader.py
      ShmRingBuffer     the memory, drawn                                 ring_buffer.py
      Notifier          wake-ups that count                               notifier.py
      Waiter, Peer      data, death and stop in one wait                  waiter.py, peers.py
    Overflow*, Remote*  the sockets                                       overflow_socket.py, remote.py
    plan_rings          shared memory for a whole engine                  shared_memory_budget.py

Nothing here imports torch, pickles, or leaves anything behind when its process is killed.
"""

from mvllm.executor.message_queue.errors import (
    PeerDiedError,
    QueueClosedError,
    QueueCorruptError,
    QueueError,
    QueueStoppedError,
    QueueTimeoutError,
    SharedMemoryError,
)
from mvllm.executor.message_queue.handles import ReaderHandle, RemoteReaderHandle, WriterHandle
from mvllm.executor.message_queue.message_reader import MessageReader, ReaderGroup
from mvllm.executor.message_queue.message_writer import MessageWriter
from mvllm.executor.message_queue.notifier import StopSignal
from mvllm.executor.message_queue.queue import MessageQueue, QueueSettings
from mvllm.executor.message_queue.ring_buffer import RingShape
from mvllm.executor.message_queue.shared_memory_budget import plan_rings, shared_memory_space

__all__ = [
    "MessageQueue",
    "MessageWriter",
    "MessageReader",
    "ReaderGroup",
    "QueueSettings",
    "RingShape",
    "WriterHandle",
    "ReaderHandle",
    "RemoteReaderHandle",
    "StopSignal",
    "plan_rings",
    "shared_memory_space",
    "QueueError",
    "QueueTimeoutError",
    "QueueStoppedError",
    "QueueClosedError",
    "QueueCorruptError",
    "PeerDiedError",
    "SharedMemoryError",
]

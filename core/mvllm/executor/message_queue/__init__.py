"""Message queues from one process to several: a ring in shared memory; sockets for large messages and other machines.

    MessageQueue        creates a queue and the handles of its ends       queue.py
      MessageWriter     enqueue                                           message_writer.py
      MessageReader     dequeue; ReaderGroup for several                  message_reader.py
    RingWriter/Reader   slot ownership, and the waits for slots           ring_writer.py, ring_reader.py
      ShmRingBuffer     the layout of the shared memory                   ring_buffer.py
      Notifier          counting wake-ups (eventfd or pipe)               notifier.py
      Waiter, Peer      one wait for data, peer death and stop            waiter.py, peers.py
    Overflow*, Remote*  the sockets                                       overflow_socket.py, tcp_transport.py
    plan_rings          shared memory for the queues of an engine         shared_memory_budget.py

No module here imports torch or pickles messages, and a killed process leaves nothing behind.
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

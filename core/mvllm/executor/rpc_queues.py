"""The message queues of one engine: rpc_broadcast_mq and one worker_response_mq per worker.

worker on this machine      reads the broadcast ring, writes a ring of its own       RpcQueues creates all of them
worker on another machine   reads the same messages over TCP, writes over TCP        RemoteResponseQueue, in the worker
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from mvllm.config.engine_config import ParallelConfig
from mvllm.executor.message_queue import (
    MessageQueue,
    MessageReader,
    MessageWriter,
    QueueSettings,
    ReaderHandle,
    RemoteReaderHandle,
    StopSignal,
    WriterHandle,
    plan_rings,
    shared_memory_space,
)
from mvllm.executor.rpc_messages import Reply

ENGINE = "EngineCore"
_REPLY_SIZE_DIVISOR = 4
"""Replies are shorter than requests, so their slots are a quarter as large."""


class RpcQueues:
    """The executor's side of all queues. Holds every descriptor; close it when all workers have theirs.

    Args:
        names: The names of the workers, in rank order.
        remote_ranks: Ranks on other machines.
        host: This machine's address as the other machines reach it; None where there are no remote ranks.
        parallel: The settings for the sizes of the queues.

    Raises:
        SharedMemoryError: There is not enough shared memory even for the smallest rings.
    """

    def __init__(
        self,
        names: Sequence[str],
        remote_ranks: Collection[int] = (),
        host: str | None = None,
        parallel: ParallelConfig = ParallelConfig(),  # noqa: B008  (frozen)
    ) -> None:
        local_ranks = [rank for rank in range(len(names)) if rank not in remote_ranks]
        self._index = {rank: index for ranks in (local_ranks, sorted(remote_ranks)) for index, rank in enumerate(ranks)}
        broadcast, response = request_settings(parallel), reply_settings(parallel)
        requested = [broadcast.shape(len(local_ranks)), *(response.shape(1) for _ in local_ranks)]
        settings = [
            msgspec.structs.replace(base, num_slots=shape.num_slots, slot_bytes=shape.slot_bytes)
            for base, shape in zip(
                [broadcast, *[response] * len(local_ranks)], plan_rings(requested, shared_memory_space())
            )
        ]
        self._broadcast = MessageQueue.create(
            "rpc_broadcast_mq",
            [names[rank] for rank in local_ranks],
            writer=ENGINE,
            settings=settings[0],
            remote_readers=[names[rank] for rank in sorted(remote_ranks)],
            host=host if remote_ranks else None,
        )
        self._responses: dict[int, MessageQueue] = {}
        try:
            for rank, setting in zip(local_ranks, settings[1:]):
                self._responses[rank] = MessageQueue.create(
                    response_queue_name(names[rank]), [ENGINE], writer=names[rank], settings=setting
                )
        except BaseException:
            self.close()
            raise

    def worker_handles(self, rank: int) -> tuple[ReaderHandle, WriterHandle]:
        """The queue handles of a worker on this machine: requests to read, replies to write."""
        return self._broadcast.reader_handle(self._index[rank]), self._responses[rank].writer_handle()

    def remote_worker_handle(self, rank: int) -> RemoteReaderHandle:
        """The handle with which a worker on another machine reads requests."""
        return self._broadcast.remote_reader_handle(self._index[rank])

    def open_writer(self, stop: StopSignal) -> MessageWriter:
        """The executor's end of rpc_broadcast_mq. Call it after `remote_worker_handle`."""
        return self._broadcast.open_writer(stop)

    def open_readers(self, stop: StopSignal) -> list[MessageReader[Reply]]:
        """The executor's ends of the response queues of workers on this machine, in rank order."""
        return [queue.open_reader(0, Reply, stop) for queue in self._responses.values()]

    def close(self) -> None:
        """Closes the descriptors, after the workers have received theirs. Idempotent."""
        for queue in (self._broadcast, *self._responses.values()):
            queue.close()


class RemoteResponseQueue:
    """The worker_response_mq of a worker on another machine than the executor, which creates it and listens.

    Args:
        name: The worker's name.
        host: This machine's address, as the executor's machine reaches it.
        parallel: How large the queue should be.
    """

    def __init__(self, name: str, host: str, parallel: ParallelConfig = ParallelConfig()) -> None:  # noqa: B008
        settings = reply_settings(parallel)
        queue = MessageQueue.create(
            response_queue_name(name), [], writer=name, settings=settings, remote_readers=[ENGINE], host=host
        )
        self.handle = queue.remote_reader_handle(0)
        self.writer = queue.open_writer()
        queue.close()


def request_settings(parallel: ParallelConfig) -> QueueSettings:
    """The settings of rpc_broadcast_mq."""
    return QueueSettings(parallel.mq_num_slots, parallel.mq_slot_bytes, parallel.mq_spin_seconds)


def reply_settings(parallel: ParallelConfig) -> QueueSettings:
    """The settings of every worker_response_mq."""
    return QueueSettings(parallel.mq_num_slots, parallel.mq_slot_bytes // _REPLY_SIZE_DIVISOR, parallel.mq_spin_seconds)


def response_queue_name(worker: str) -> str:
    return f"worker_response_mq of {worker}"

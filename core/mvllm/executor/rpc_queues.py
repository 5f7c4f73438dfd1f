"""The queues of one engine: rpc_broadcast_mq and every worker_response_mq, planned together.

worker on this machine      reads a ring and writes a ring of its own                        made here, all of them
worker on another machine   reads the same messages over TCP, and makes its own queue back   see RemoteResponseQueue
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
"""Replies are shorter than requests: their slots are as many, and a quarter as large."""


class RpcQueues:
    """The executor's side. Holds every descriptor; close it when all workers have theirs.

    Args:
        names: The workers, in rank order.
        far: Ranks on other machines.
        host: This machine's address for them; None where there are none.
        parallel: How large the queues should be.

    Raises:
        SharedMemoryError: There is not enough shared memory, even for small rings.
    """

    def __init__(
        self,
        names: Sequence[str],
        far: Collection[int] = (),
        host: str | None = None,
        parallel: ParallelConfig = ParallelConfig(),  # noqa: B008  (frozen)
    ) -> None:
        near = [rank for rank in range(len(names)) if rank not in far]
        self._index = {rank: index for ranks in (near, sorted(far)) for index, rank in enumerate(ranks)}
        broadcast, response = request_settings(parallel), reply_settings(parallel)
        wanted = [broadcast.shape(len(near)), *(response.shape(1) for _ in near)]
        settings = [
            msgspec.structs.replace(base, num_slots=shape.num_slots, slot_bytes=shape.slot_bytes)
            for base, shape in zip([broadcast, *[response] * len(near)], plan_rings(wanted, shared_memory_space()))
        ]
        self._broadcast = MessageQueue.create(
            "rpc_broadcast_mq",
            [names[rank] for rank in near],
            writer=ENGINE,
            settings=settings[0],
            remote_readers=[names[rank] for rank in sorted(far)],
            host=host if far else None,
        )
        self._responses: dict[int, MessageQueue] = {}
        try:
            for rank, setting in zip(near, settings[1:]):
                self._responses[rank] = MessageQueue.create(
                    response_queue_name(names[rank]), [ENGINE], writer=names[rank], settings=setting
                )
        except BaseException:
            self.close()
            raise

    def worker_handles(self, rank: int) -> tuple[ReaderHandle, WriterHandle]:
        """What a worker on this machine needs."""
        return self._broadcast.reader_handle(self._index[rank]), self._responses[rank].writer_handle()

    def remote_worker_handle(self, rank: int) -> RemoteReaderHandle:
        """What a worker on another machine needs to read requests."""
        return self._broadcast.remote_reader_handle(self._index[rank])

    def open_writer(self, stop: StopSignal) -> MessageWriter:
        """The executor's end of rpc_broadcast_mq. Ask for the workers' ends first."""
        return self._broadcast.open_writer(stop)

    def open_readers(self, stop: StopSignal) -> list[MessageReader[Reply]]:
        """The executor's ends of what the workers on this machine write, in rank order."""
        return [queue.open_reader(0, Reply, stop) for queue in self._responses.values()]

    def close(self) -> None:
        """Gives up what the workers have got. Idempotent."""
        for queue in (self._broadcast, *self._responses.values()):
            queue.close()


class RemoteResponseQueue:
    """The worker_response_mq of a worker on another machine than the executor: the worker makes it, and listens.

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
    """What rpc_broadcast_mq should be like."""
    return QueueSettings(parallel.mq_num_slots, parallel.mq_slot_bytes, parallel.mq_spin_seconds)


def reply_settings(parallel: ParallelConfig) -> QueueSettings:
    """What every worker_response_mq should be like."""
    return QueueSettings(parallel.mq_num_slots, parallel.mq_slot_bytes // _REPLY_SIZE_DIVISOR, parallel.mq_spin_seconds)


def response_queue_name(worker: str) -> str:
    return f"worker_response_mq of {worker}"

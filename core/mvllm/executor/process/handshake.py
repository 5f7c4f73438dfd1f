"""The messages at the start of a worker process: WorkerStartArgs to the worker, Handshake from the worker.

They use one socket pair per worker, which stays open: its end tells each process that the other one has ended.
"""

from __future__ import annotations

import os
import socket
from typing import TypeVar

import msgspec

from mvllm.executor.message_queue.handles import ReaderHandle, WriterHandle
from mvllm.executor.process.activity_table import ActivityTable
from mvllm.executor.process.message_frames import encode_frame, read_frame
from mvllm.executor.rpc_messages import WorkerFailure, describe_failure
from mvllm.platform.topology import WorkerContext

T = TypeVar("T")


class WorkerStartArgs(msgspec.Struct, frozen=True):
    """The start message of a worker process.

    Attributes:
        name: For logs, errors and the process list, for instance `Worker_TP0`.
        context: Rank and launch settings of the worker.
        platform: The platform's name, by which the process finds the plugin.
        config: The engine's configuration, see config_codec.
        requests, replies: Its ends of rpc_broadcast_mq and worker_response_mq.
        activity_fd: Descriptor of the activity table.
        stack_fd: Descriptor of the file that its stacks are written to.
        sys_path: The parent's module search path.
        python_path: The parent's PYTHONPATH, which the launch has replaced.
        log_level: The level of the `mvllm` loggers.
    """

    name: str
    context: WorkerContext
    platform: str
    config: bytes
    requests: ReaderHandle
    replies: WriterHandle
    activity_fd: int
    stack_fd: int
    sys_path: list[str]
    python_path: str | None
    log_level: str

    @property
    def rank(self) -> int:
        """Its rank, which is its row of the activity table."""
        return self.context.rank


class Handshake(msgspec.Struct, frozen=True):
    """Reports that the worker waits for requests, or why it cannot.

    Attributes:
        failure: The error that ended its start, or None.
    """

    failure: WorkerFailure | None = None

    @classmethod
    def of_error(cls, error: BaseException, name: str, rank: int, activity_table: ActivityTable) -> Handshake:
        """Reports `error`, which ended the worker in this process."""
        activity = str(activity_table.read(rank))
        return cls(describe_failure(error, rank=rank, pid=os.getpid(), name=name, activity=activity))


def send_message(to: socket.socket, message: msgspec.Struct) -> None:
    """Sends one message, whole."""
    to.sendall(encode_frame(msgspec.msgpack.encode(message)))


def receive_handshake(source: socket.socket) -> Handshake | None:
    """The worker's Handshake, or None if it ended without one."""
    try:
        return receive_message(source, Handshake)
    except (EOFError, ConnectionError):
        return None


def receive_message(source: socket.socket, kind: type[T]) -> T:
    """Receives what `send_message` sent.

    Raises:
        EOFError: The other process closed the connection.
    """
    return msgspec.msgpack.decode(read_frame(source.recv), type=kind)

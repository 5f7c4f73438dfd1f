"""How a worker process is told what it is, and how it says that it is ready.

One socket pair per worker carries three things: down, one WorkerStartArgs; up, one Handshake; and, by staying open, the
fact that the other side lives. Messages are msgpack behind a 4-byte length.
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
    """Everything a worker process needs to know.

    Attributes:
        name: For logs, errors and the process list, for instance `Worker_TP0`.
        context: Which worker it is.
        platform: The platform's name; the plugin is found again by it.
        config: The engine's configuration, see config_codec.
        requests, replies: Its ends of rpc_broadcast_mq and worker_response_mq.
        activity_fd: The status board.
        stack_fd: Where its stacks go when it crashes or hangs.
        sys_path: Where the parent finds modules.
        python_path: The parent's own PYTHONPATH, which the launch had to replace.
        log_level: Of the `mvllm` loggers.
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
        """Its rank, which is its line on the status board."""
        return self.context.rank


class Handshake(msgspec.Struct, frozen=True):
    """The worker waits for requests, or has failed before it could."""

    failure: WorkerFailure | None = None

    @classmethod
    def of_error(cls, error: BaseException, name: str, rank: int, board: ActivityTable) -> Handshake:
        """Of a worker of this process that cannot go on because of `error`."""
        activity = str(board.read(rank))
        return cls(describe_failure(error, rank=rank, pid=os.getpid(), name=name, activity=activity))


def send_message(to: socket.socket, message: msgspec.Struct) -> None:
    """Sends one message, whole."""
    to.sendall(encode_frame(msgspec.msgpack.encode(message)))


def receive_handshake(source: socket.socket) -> Handshake | None:
    """The worker's answer, or None when it ended without one."""
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

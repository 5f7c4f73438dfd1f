"""The messages at the start of a worker process: WorkerStartArgs to the worker, Handshake from the worker.

They use one socket pair per worker, which stays open: its end tells each process that the other one has ended.
"""

from __future__ import annotations

import os
import socket
from typing import Self, TypeVar

import msgspec

from mvllm.executor.message_queue.handles import ReaderHandle, WriterHandle
from mvllm.executor.process.activity_table import ActivityTable
from mvllm.executor.process.message_frames import encode_frame, read_frame
from mvllm.executor.process.process_utils import anonymous_file, module_search_path
from mvllm.logging import log_level
from mvllm.messages.process_failure import ProcessFailure, describe_failure
from mvllm.platform.topology import WorkerContext

T = TypeVar("T")


class ChildStartArgs(msgspec.Struct, frozen=True, kw_only=True):
    """What every child process is started with: the first message on its control socket.

    Attributes:
        name: For logs, errors and the process list, for instance `Worker_TP0`.
        activity_fd: The activity table.
        stack_fd: The file for its stacks when it crashes or hangs.
        sys_path: The parent's module search path.
        python_path: The parent's own PYTHONPATH, which the launch had to replace.
        log_level: The level of the `mvllm` loggers.
    """

    name: str
    activity_fd: int = -1
    stack_fd: int = -1
    sys_path: list[str] = []
    python_path: str | None = None
    log_level: str = ""

    @property
    def rank(self) -> int:
        """Its row of the activity table."""
        return 0

    def with_parent_state(self, activity_fd: int) -> Self:
        """These arguments with everything that the parent process adds; opens `stack_fd`."""
        return msgspec.structs.replace(
            self,
            activity_fd=activity_fd,
            stack_fd=anonymous_file("stacks"),
            sys_path=module_search_path(),
            python_path=os.environ.get("PYTHONPATH"),
            log_level=log_level(),
        )


class WorkerStartArgs(ChildStartArgs, frozen=True, kw_only=True):
    """What a worker process is started with.

    Attributes:
        context: Which worker it is.
        platform: The platform's name, by which the process finds the plugin.
        config: The engine's configuration, see config_codec.
        requests, replies: Its ends of rpc_broadcast_mq and worker_response_mq.
    """

    context: WorkerContext
    platform: str
    config: bytes
    requests: ReaderHandle
    replies: WriterHandle

    @property
    def rank(self) -> int:
        return self.context.rank


class Handshake(msgspec.Struct, frozen=True):
    """A child process' answer to its start: it is ready, or has failed before that or later."""

    failure: ProcessFailure | None = None

    @classmethod
    def of_error(cls, error: BaseException, name: str, rank: int | None, activity_table: ActivityTable) -> Handshake:
        """The handshake of a process that fails with `error`.

        Args:
            name: The process.
            rank: The worker's rank; None for a process that is not a worker.
            activity_table: The table with its last activity.
        """
        activity = str(activity_table.read(rank or 0))
        return cls(describe_failure(error, name=name, activity=activity, rank=rank))


def send_message(to: socket.socket, message: msgspec.Struct) -> None:
    """Sends one message, whole."""
    to.sendall(encode_frame(msgspec.msgpack.encode(message)))


def receive_message(source: socket.socket, kind: type[T]) -> T:
    """Receives what `send_message` sent.

    Raises:
        EOFError: The other process closed the connection.
    """
    return msgspec.msgpack.decode(read_frame(source.recv), type=kind)

"""A worker process: `python -m mvllm.executor.worker_process <name> <control socket>`.

    start   name itself, promise to die with its parent, read WorkerStart from the control socket
    build   find the platform by name, build the worker (this is where torch is imported), say "ready"
    loop    take requests until told to stop: WorkerProc

Nothing heavy is imported before WorkerStart is there, and the platform's environment variables are set before this
program starts.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from mvllm.executor.handshake import Handshake, receive_start, send_message
from mvllm.executor.message_queue import MessageWriter
from mvllm.executor.process_tools import (
    adopt_parent,
    die_with_parent,
    keep_standard_streams,
    leave,
    set_process_name,
    watch_parent,
    write_last_words,
)
from mvllm.executor.rpc import describe_failure
from mvllm.executor.status_board import StatusBoard
from mvllm.executor.worker_proc import WorkerProc


def main() -> None:
    """The program. Never returns."""
    keep_standard_streams()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    name, control_fd, parent_pid = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    die_with_parent(parent_pid)
    set_process_name(name)
    control = socket.socket(fileno=control_fd)
    try:
        start = receive_start(control)
    except (EOFError, ConnectionError):
        os._exit(1)
    watch_parent(control)
    adopt_parent(start.name, start.sys_path, start.python_path, start.stack_fd, start.log_level)
    board = StatusBoard(start.board_fd)
    try:
        replies = MessageWriter.attach(start.replies)
        proc = WorkerProc.build(start.name, start.context, start.platform, start.config, start.requests, replies, board)
    except Exception as e:  # noqa: BLE001  (travels to the executor)
        activity = str(board.read(start.context.rank))
        failure = describe_failure(e, rank=start.context.rank, pid=os.getpid(), name=start.name, activity=activity)
        send_message(control, Handshake(failure))
        leave(1)
    send_message(control, Handshake())
    try:
        proc.worker_busy_loop()
    except Exception as e:  # noqa: BLE001  (a queue that cannot be read or written any more; told by way of the parent)
        write_last_words(start.stack_fd, e)
        leave(1)
    proc.shutdown()
    leave(0)


if __name__ == "__main__":
    main()

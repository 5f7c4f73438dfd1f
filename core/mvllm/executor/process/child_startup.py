"""The start of every child process of an engine, with the arguments `<name> <control socket> <parent pid>`.

The process sets its name, ties itself to its parent, and reads its start message from the control socket.
"""

from __future__ import annotations

import signal
import socket
import sys
from typing import Protocol, TypeVar

from mvllm.executor.process.activity_table import ActivityTable
from mvllm.executor.process.handshake import receive_message
from mvllm.executor.process.process_utils import (
    configure_child_process,
    die_with_parent,
    ensure_standard_streams,
    exit_process,
    set_process_name,
    watch_parent,
)


class ChildStartMessage(Protocol):
    """The fields that the start messages of all kinds of processes have."""

    @property
    def name(self) -> str: ...
    @property
    def activity_fd(self) -> int: ...
    @property
    def stack_fd(self) -> int: ...
    @property
    def sys_path(self) -> list[str]: ...
    @property
    def python_path(self) -> str | None: ...
    @property
    def log_level(self) -> str: ...


Start = TypeVar("Start", bound=ChildStartMessage)


def initialize_child(kind: type[Start]) -> tuple[Start, socket.socket, ActivityTable]:
    """Initializes this process from its arguments and the first message on the control socket.

    Ends the process if the parent has closed the socket before it sent the message.

    Returns:
        The start message, the control socket, and the table for the activity of this process.
    """
    ensure_standard_streams()
    for number in (signal.SIGINT, signal.SIGHUP):  # the parent reacts to Ctrl-C and a closed terminal
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    name, control_fd, parent_pid = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    die_with_parent(parent_pid)
    set_process_name(name)
    control = socket.socket(fileno=control_fd)
    try:
        start = receive_message(control, kind)
    except (EOFError, ConnectionError):
        exit_process(1)
    watch_parent(control)
    configure_child_process(start.name, start.sys_path, start.python_path, start.stack_fd, start.log_level)
    return start, control, ActivityTable(start.activity_fd)

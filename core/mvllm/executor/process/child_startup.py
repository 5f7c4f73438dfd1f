"""How every child process of an engine starts: workers, engine cores, the coordinator and API servers.

The command line is `... <name> <control socket> <parent pid>`; the first message on the control socket is the start
arguments. `run_child` is the `main` of a process that answers them with a Handshake.
"""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

from mvllm.executor.process.activity_table import ActivityTable
from mvllm.executor.process.handshake import ChildStartArgs, Handshake, receive_message, send_message
from mvllm.executor.process.process_utils import (
    configure_child_process,
    die_with_parent,
    ensure_standard_streams,
    exit_process,
    set_process_name,
    watch_parent,
)

Start = TypeVar("Start", bound=ChildStartArgs)


def run_child(start_type: type[Start], program: Callable[[Start, socket.socket, ActivityTable], int]) -> NoReturn:
    """Runs `program` as this process, and exits with the status it returns.

    An exception is sent to the parent as a Handshake, whether or not one has been sent before; its bytes stay in the
    control socket after the exit, so the parent finds it.

    Args:
        program: Called with the start arguments, the control socket and the activity table. Sends the Handshake that
            reports it ready.
    """
    start, control, table = initialize_child(start_type)
    try:
        status = program(start, control, table)
    except BaseException as e:  # noqa: BLE001  (sent to the parent)
        send_message(control, Handshake.of_error(e, start.name, None, table))
        exit_process(1)
    exit_process(status)


def initialize_child(start_type: type[Start]) -> tuple[Start, socket.socket, ActivityTable]:
    """Configures this interpreter according to its command line and its start arguments.

    Exits if the parent has ended or closed the control socket before the start arguments have arrived.

    Returns:
        The start arguments, the control socket, and the table to which the process writes its activity.
    """
    ensure_standard_streams()
    for number in (signal.SIGINT, signal.SIGHUP):  # the parent handles Ctrl-C and a closed terminal
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    name, control_fd, parent_pid = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    die_with_parent(parent_pid)
    set_process_name(name)
    control = socket.socket(fileno=control_fd)
    try:
        start = receive_message(control, start_type)
    except (EOFError, ConnectionError):
        exit_process(1)
    watch_parent(control)
    configure_child_process(start.name, start.sys_path, start.python_path, start.stack_fd, start.log_level)
    return start, control, ActivityTable(start.activity_fd)

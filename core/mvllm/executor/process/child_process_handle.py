"""The parent's handle of a child process: starts it, reads its handshake and stacks, signals and reaps it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import msgspec

from mvllm.executor.process.activity_table import STARTING, ActivityTable
from mvllm.executor.process.handshake import ChildStartArgs, Handshake, receive_message, send_message
from mvllm.executor.process.process_utils import STACK_SIGNAL, is_stopped, open_pidfd
from mvllm.executor.worker_handle import WorkerHandle


class ChildProcessHandle(WorkerHandle):
    """A running (or ended) child process. Made with `launch`.

    Attributes:
        module: The module whose `main` the process runs.
        handshake_type: The class of the answer to its start arguments.
        control: The parent's end of the socket pair between the two.
    """

    module: ClassVar[str] = "mvllm.executor.worker_main"
    handshake_type: ClassVar[type[Handshake]] = Handshake
    control: socket.socket

    def __init__(
        self,
        start: ChildStartArgs,
        process: subprocess.Popen[bytes],
        control: socket.socket,
        activity_table: ActivityTable,
    ) -> None:
        super().__init__(start.name, start.rank, process.pid, activity_table, start.stack_fd)
        self.control = control
        self.pidfd = open_pidfd(process.pid)
        self._process = process

    @classmethod
    def launch(
        cls, start: ChildStartArgs, env: Mapping[str, str], pass_fds: Sequence[int], activity_table: ActivityTable
    ) -> Self:
        """Starts the process. The calling thread must live as long as the process: the kernel ties the two together.

        Args:
            start: The message to send.
            env: Environment variables to set.
            pass_fds: The descriptors that `start` names.
            activity_table: Where the process writes its activity.
        """
        parent_end, child_end = socket.socketpair()
        with child_end:
            arguments = [cls.module, start.name, str(child_end.fileno()), str(os.getpid())]
            command = [sys.executable, "-P", "-m", "mvllm.executor.process.child_program", *arguments]
            process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(start.sys_path), **env},
                pass_fds=(child_end.fileno(), *pass_fds),
                stdin=subprocess.DEVNULL,
                cwd=None if _has_working_directory() else os.sep,
                # Ctrl-C in a terminal signals the whole foreground group; children react to their parent's end instead.
                # And processes that a child starts can be killed with its group.
                process_group=0,
            )
        handle = cls(start, process, parent_end, activity_table)
        with contextlib.suppress(BrokenPipeError, ConnectionError):  # it has ended, which the monitor notices
            send_message(parent_end, start)
        return handle

    @property
    def is_running(self) -> bool:
        return self.exit_code is None

    @property
    def is_stopped(self) -> bool:
        """As in WorkerHandle."""
        return is_stopped(self.pid)

    def receive_handshake(self) -> Handshake | None:
        """Receives the answer to the start; None when the process ended without one. `control` must be readable."""
        try:
            return receive_message(self.control, self.handshake_type)
        except (OSError, EOFError, msgspec.MsgspecError):
            return None

    def reap(self) -> bool:
        """Collects the exit status if the process has ended; returns whether it has.

        Called by one thread only. Other processes of its process group are killed first, while its pid cannot have been
        reused yet.
        """
        if self.exit_code is not None:
            return True
        if not _has_ended(self.pid):
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.exit_code = self._process.wait()
        return True

    def send_signal(self, number: signal.Signals) -> None:
        """Has no effect when the process has ended."""
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def close_death_pipe(self) -> None:
        """Closes the control socket in both directions, at which the process ends itself."""
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)

    def dump_stack(self) -> str:
        """As in WorkerHandle. Empty while the interpreter starts: the signal would kill it."""
        if self.activity.text == STARTING:
            return ""
        return self.stacks.read_after(lambda: self.send_signal(STACK_SIGNAL))

    def describe_exit(self) -> str:
        assert self.exit_code is not None
        activity = self.activity
        reason, stack = self.stacks.crash_report()
        message = f"{self} {_describe_exit(self.exit_code)} {activity.during()}{f': {reason}' if reason else '.'}"
        if stack:
            message += f"\nIts stack:\n{stack.rstrip()}"
        return message


def _has_working_directory() -> bool:
    """Whether the working directory of this process still exists; without one, libraries cannot be loaded."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _has_ended(pid: int) -> bool:
    """Whether the process has ended. Leaves its status uncollected, so that its pid is not reused."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # the status has been collected already
        return True


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exited with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    text = f"was killed by {name} (signal {-code})"
    if -code == signal.SIGKILL:
        text += ", likely because the machine was out of memory (see the kernel's log),"
    return text

"""One process that works for this one, as its parent sees it: started, watched, asked for its stack, ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol, Self, cast

import msgspec

from mvllm.executor.process.activity_table import STARTING, ActivityTable
from mvllm.executor.process.handshake import receive_handshake, send_message
from mvllm.executor.process.process_utils import STACK_SIGNAL, is_stopped, open_pidfd
from mvllm.executor.worker_handle import WorkerHandle


class SerializedFailure(Protocol):
    """An exception that has travelled."""

    def to_exception(self) -> Exception:
        """The exception, as it is raised here."""


class StartReply(Protocol):
    """An answer to being started."""

    @property
    def failure(self) -> SerializedFailure | None:
        """Why it could not start, or None."""


class ChildStartArgs(Protocol):
    """What a process is told first, as far as the one who starts it must know. A msgspec struct."""

    @property
    def name(self) -> str:
        """For logs, errors and the process list."""

    @property
    def rank(self) -> int:
        """Its line on the status board."""

    @property
    def stack_fd(self) -> int:
        """Where its stacks go."""

    @property
    def sys_path(self) -> list[str]:
        """Where it finds modules."""


class ChildProcessHandle(WorkerHandle):
    """A running (or ended) child process. Made with `launch`.

    Attributes:
        module: The module whose `main` the process runs.
        control: The parent's end of the socket pair between the two.
    """

    module: ClassVar[str] = "mvllm.executor.worker_main"
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
        cls, start: ChildStartArgs, env: Mapping[str, str], pass_fds: Sequence[int], board: ActivityTable
    ) -> Self:
        """Starts the process. The calling thread must live as long as the worker: the kernel ties the two together.

        Args:
            start: What the worker is told.
            env: Variables to set before its program starts.
            pass_fds: The descriptors that `start` speaks of.
            board: Where it will say what it does.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            own = [cls.module, start.name, str(theirs.fileno()), str(os.getpid())]
            command = [sys.executable, "-P", "-m", "mvllm.executor.process.child_program", *own]
            process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(start.sys_path), **env},
                pass_fds=(theirs.fileno(), *pass_fds),
                stdin=subprocess.DEVNULL,
                cwd=None if _has_working_directory() else os.sep,
                # Ctrl-C in a terminal goes to the whole foreground group; workers hear of it from their parent. And
                # whatever a worker starts can be ended with its group.
                process_group=0,
            )
        handle = cls(start, process, ours, board)
        with contextlib.suppress(BrokenPipeError, ConnectionError):  # its death is noticed where deaths are
            send_message(ours, cast(msgspec.Struct, start))
        return handle

    @property
    def is_running(self) -> bool:
        return self.exit_code is None

    @property
    def is_stopped(self) -> bool:
        """Whether the kernel lets it do nothing, after SIGSTOP or in a debugger."""
        return is_stopped(self.pid)

    def receive_handshake(self) -> StartReply | None:
        """Its answer to being started; None when it ended without one. Call when `control` is readable."""
        return receive_handshake(self.control)

    def reap(self) -> bool:
        """Collects the exit status if the process has ended; returns whether it has.

        Called by one thread only. Whatever the worker left running in its group is killed first, while its own number
        cannot belong to anybody else yet.
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
        """Does nothing when the process has ended."""
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def close_death_pipe(self) -> None:
        """Tells the worker that its parent has given it up."""
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)

    def dump_stack(self) -> str:
        """The stacks of all its threads, most recent call first; what there is after half a second.

        Empty while the interpreter starts: the signal would still kill it.
        """
        if self.activity.text == STARTING:
            return ""
        return self.stacks.read_after(lambda: self.send_signal(STACK_SIGNAL))

    def describe_exit(self) -> str:
        """How it ended and what it was doing, with its stack if it left one."""
        assert self.exit_code is not None
        activity = self.activity
        reason, stack = self.stacks.crash_report()
        message = f"{self} {_describe_exit(self.exit_code)} {activity.during()}{f': {reason}' if reason else '.'}"
        if stack:
            message += f"\nIts stack:\n{stack.rstrip()}"
        return message


def _has_working_directory() -> bool:
    """Whether this process' working directory still exists: libraries cannot be loaded where it does not."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _has_ended(pid: int) -> bool:
    """Without collecting the status: the process stays a zombie, and its number its own."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # somebody else has collected it
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

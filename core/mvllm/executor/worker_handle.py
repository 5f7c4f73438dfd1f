"""One worker process as the executor sees it: identity, activity, stacks, and the errors that report its end."""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod

from mvllm.errors import WorkerDiedError, WorkerStuckError
from mvllm.executor.process.activity_table import Activity, ActivityTable
from mvllm.executor.process.process_utils import StackFile


class WorkerHandle(ABC):
    """Base of the handles that a WorkerGroup holds. As text: name, rank and process id.

    Args:
        name: For instance `Worker_TP0`.
        rank: Its rank, which is its row of `activity_table`.
        pid: Its process id.
        activity_table: Where its activity is read from.
        stack_fd: The file that its stacks are written to, which the handle takes over; -1 for none.

    Attributes:
        name, rank, pid: As given.
        is_ready: Whether it waits for requests.
        exit_code: Its exit status, minus a signal's number; None while it runs, or where the status is unknown.
        control: A socket that the kernel closes when the process ends; None where there is none.
        pidfd: Readable when the process has ended; -1 where there is none.
        stacks: The file that its stacks are written to.
    """

    def __init__(self, name: str, rank: int, pid: int, activity_table: ActivityTable, stack_fd: int) -> None:
        self.name = name
        self.rank = rank
        self.pid = pid
        self.is_ready = False
        self.exit_code: int | None = None
        self.control: socket.socket | None = None
        self.pidfd = -1
        self.stacks = StackFile(stack_fd)
        self._activity_table = activity_table

    def __str__(self) -> str:
        return f"{self.name} (rank {self.rank}, pid {self.pid})"

    @property
    def activity(self) -> Activity:
        """The activity of the worker, as the table has it."""
        return self._activity_table.read(self.rank)

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """Whether no end of the process has been noticed yet."""

    @property
    @abstractmethod
    def is_stopped(self) -> bool:
        """Whether the process is stopped, as by SIGSTOP or a debugger; False where that is unknown."""

    @abstractmethod
    def dump_stack(self) -> str:
        """The stacks of all threads, most recent call first, as written within a short time; may be empty."""

    @abstractmethod
    def describe_exit(self) -> str:
        """How the process ended and what it was doing, with its stack if it left one."""

    def death_error(self) -> Exception:
        """The error for the end of this worker."""
        message, activity = self.describe_exit(), str(self.activity)
        return WorkerDiedError(message, rank=self.rank, pid=self.pid, activity=activity, exit_code=self.exit_code)

    def stuck_error(self, message: str) -> Exception:
        """The error for a deadline that this worker missed; `message` says which."""
        return WorkerStuckError(message, rank=self.rank, pid=self.pid, activity=str(self.activity))

    def close(self) -> None:
        """Closes the handle's descriptors. Call it after the end of the process. Idempotent."""
        if self.control is not None:
            self.control.close()
        self.stacks.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

"""The connection of a front end to one engine core process: its sockets, its activity, its failure.

LaunchedCoreConnection   the front end's process has started the core, and ends it
JoinedCoreConnection     another process has, and reports the core's start and failure
"""

from __future__ import annotations

import math
import os
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable

import zmq

from mvllm.engine.process.core_handshake import CoreReady
from mvllm.engine.process.zmq_channel import ClientChannel
from mvllm.errors import EngineDeadError
from mvllm.executor.process.activity_table import Activity, ActivityTable
from mvllm.messages.core_protocol import CoreMessage


class CoreConnection(ABC):
    """The connection to one engine core. The client that uses it waits for updates.

    Args:
        channel: The front end's sockets.
        activity_table: The table to which the core's process writes its activity.
        failure_fd: A descriptor that becomes readable, and stays so, when the core can no longer be used.
        unresponsive_timeout: Seconds without an update after which a core that has work is considered hung.
        close: Frees all resources. Called once: by `shutdown`, when the object is garbage-collected, or at the exit of
            the interpreter. Must not refer to this object.

    Attributes:
        channel, failure_fd, unresponsive_timeout: As given.
    """

    def __init__(
        self,
        channel: ClientChannel,
        activity_table: ActivityTable,
        failure_fd: int,
        unresponsive_timeout: float,
        close: Callable[[], None],
    ) -> None:
        self.channel = channel
        self.failure_fd = failure_fd
        self.unresponsive_timeout = unresponsive_timeout
        self._activity_table = activity_table
        self._finalizer = weakref.finalize(self, _close_unless_forked, close, os.getpid())

    @property
    @abstractmethod
    def pid(self) -> int:
        """The core's process id."""

    @property
    @abstractmethod
    def failure(self) -> EngineDeadError | None:
        """Why the core can no longer be used, or None."""

    @abstractmethod
    def launch(self) -> None:
        """Starts the core's process, unless another process has; returns when it exists."""

    @abstractmethod
    def wait_ready(self) -> tuple[CoreReady, dict[str, float]]:
        """Waits until commands can be sent.

        Returns:
            The core's answer to its start, and seconds per phase of the start.

        Raises:
            Exception: The core's own exception, if it cannot be started.
            EngineDeadError: The core has died, or has not connected in time.
        """

    @abstractmethod
    def kill_unresponsive(self) -> None:
        """Ends a core that has sent no update for `unresponsive_timeout`, or has its parent end it."""

    def dump_stack(self) -> str:
        """The stacks of the core's threads; empty if another process has started it."""
        return ""

    @property
    def is_open(self) -> bool:
        """Whether `shutdown` has not been called."""
        return self._finalizer.alive

    @property
    def activity(self) -> Activity:
        """The core's last reported activity."""
        return self._activity_table.read(0)

    @property
    def shared_step_age(self) -> float:
        """Seconds since the start of the running step, whichever front end's requests it computes; 0 without one."""
        return 0.0

    def check_usable(self) -> None:
        """Raises unless the core can be used.

        Raises:
            EngineDeadError: The core has failed (the cause is kept), or `shutdown` has been called.
        """
        if not self.is_open:
            raise EngineDeadError("The engine core has been shut down.")
        if (failure := self.failure) is not None:
            raise failure

    def send(self, command: CoreMessage) -> int:
        """Queues a command; never blocks. Returns its number.

        Raises:
            zmq.ZMQError: The core has closed its end of the socket; its failure will be reported.
        """
        return self.channel.send(command)

    def shutdown(self) -> None:
        """Closes the connection, and ends the core if this process started it. Idempotent."""
        self._finalizer()

    def _wait_connected(self, check: Callable[[], None]) -> bool:
        """Waits until the core has connected, for `unresponsive_timeout` at most; returns whether it has.

        Args:
            check: Raises the core's failure.
        """
        poller = zmq.Poller()
        poller.register(self.channel.commands, zmq.POLLIN)
        poller.register(self.failure_fd, zmq.POLLIN)
        deadline = time.monotonic() + self.unresponsive_timeout
        while not self.channel.is_connected():
            check()
            if not poller.poll(milliseconds(deadline - time.monotonic())):
                return False
        return True


def milliseconds(seconds: float) -> int:
    """The timeout for `poll`: rounded up, and not negative."""
    return max(0, math.ceil(seconds * 1e3))


def _close_unless_forked(close: Callable[[], None], pid: int) -> None:
    """Calls `close`, unless this process is a fork of the one with number `pid`, which owns the resources."""
    if os.getpid() == pid:
        close()

"""An engine core that another process has started, for a front end that joins it.

What a LaunchedCoreConnection knows of a core because it is its parent, this one is told: by whoever started both,
when the core has died; and by the core's own status board, how long it has been at what it does.
"""

from __future__ import annotations

from collections.abc import Callable

from mvllm.engine.process.core_handshake import CoreReady
from mvllm.engine.process.launched_core_connection import wait_connected
from mvllm.engine.process.zmq_channel import ChannelAddress, ClientChannel
from mvllm.errors import EngineDeadError
from mvllm.executor.message_queue import StopSignal
from mvllm.executor.process.activity_table import Activity, ActivityTable
from mvllm.messages.core_protocol import Command


class JoinedCoreConnection:
    """See AsyncMPClient's CoreConnection.

    Args:
        address: Where this front end and the core meet.
        activity_fd: The core's status board; taken over.
        unresponsive_timeout: Seconds without a sign of life after which a core that has work is taken for hung.
        report_hung: Told that this core is, so that its parent ends it.
    """

    def __init__(
        self, address: ChannelAddress, activity_fd: int, unresponsive_timeout: float, report_hung: Callable[[], None]
    ) -> None:
        self.unresponsive_timeout = unresponsive_timeout
        self.channel = ClientChannel([address])
        self._identity = address.identity
        self._activity_table = ActivityTable(activity_fd)
        self._stop = StopSignal()
        self._report_hung = report_hung
        self._failure: EngineDeadError | None = None
        self._ready: CoreReady | None = None
        self._pid = 0
        self._is_open = True

    def mark_ready(self, ready: CoreReady, pid: int) -> None:
        """The core waits for requests."""
        self._ready, self._pid = ready, pid

    @property
    def is_ready(self) -> bool:
        """Whether it waits for requests, as far as is known."""
        return self._ready is not None

    def set_failure(self, error: EngineDeadError) -> None:
        """The core can no longer be used. Call before anything else is done about it, from any thread."""
        if self._failure is None:
            self._failure = error
            self._stop.set()

    @property
    def is_open(self) -> bool:
        """Whether `shutdown` has not been called."""
        return self._is_open

    @property
    def pid(self) -> int:
        """The core's process."""
        return self._pid

    @property
    def activity(self) -> Activity:
        """What the core said last that it is doing."""
        return self._activity_table.read(0)

    @property
    def shared_step_age(self) -> float:
        """For how long it has been at a step, whosever requests that is for; 0 where it is at none."""
        if not self._is_open:
            return 0.0
        activity = self.activity
        return 0.0 if activity.step is None else activity.seconds

    @property
    def failure_fd(self) -> int:
        """Readable for good once the core can no longer be used."""
        return self._stop.fd

    def launch(self) -> None:
        """It has been launched."""

    def wait_ready(self) -> tuple[CoreReady, dict[str, float]]:
        """Waits until commands can be sent. Call after `note_ready`.

        Raises:
            EngineDeadError: The core has died, or does not come.
        """
        assert self._ready is not None
        if not wait_connected(self.channel, self.failure_fd, self.unresponsive_timeout, self.check_usable):
            raise EngineDeadError(
                f"The engine core (pid {self._pid}) has not connected in {self.unresponsive_timeout:g} s."
            )
        return self._ready, self._ready.start_seconds

    def check_usable(self) -> None:
        """Raises unless the core can be used.

        Raises:
            EngineDeadError: It has died, or this front end has left it.
        """
        if self._failure is not None:
            raise self._failure
        if not self._is_open:
            raise EngineDeadError("The engine core has been shut down.")

    def send(self, command: Command) -> int:
        """Queues a command; never blocks. Returns its number.

        Raises:
            zmq.ZMQError: The core's end of the socket is closed: the news of its death are on their way.
        """
        return self.channel.send(self._identity, command)

    def kill_unresponsive(self) -> None:
        """Has its parent end a core that has been silent for too long."""
        self._report_hung()

    def shutdown(self) -> None:
        """Leaves the core; its parent ends it. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        self.channel.close()
        self._activity_table.close()

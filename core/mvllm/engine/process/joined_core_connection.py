"""The connection to an engine core that another process has started.

The parent process reports the core's start and its failure; how long its current activity has taken is read from the
core's activity table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mvllm.engine.process.core_connection import CoreConnection
from mvllm.engine.process.core_handshake import CoreReady
from mvllm.engine.process.zmq_channel import ChannelAddress, ClientChannel
from mvllm.errors import EngineDeadError
from mvllm.executor.message_queue import StopSignal
from mvllm.executor.process.activity_table import ActivityTable


class JoinedCoreConnection(CoreConnection):
    """See CoreConnection.

    Args:
        address: The addresses of the sockets between this front end and the core.
        activity_fd: The core's activity table; closed with the connection.
        unresponsive_timeout: Seconds without an update after which a core that has work is considered hung.
        report_hung: Called with such a core, so that its parent ends it.
    """

    def __init__(
        self, address: ChannelAddress, activity_fd: int, unresponsive_timeout: float, report_hung: Callable[[], None]
    ) -> None:
        channel, table, self._stop = ClientChannel(address), ActivityTable(activity_fd), StopSignal()
        super().__init__(channel, table, self._stop.fd, unresponsive_timeout, partial(_close_all, channel, table))
        self._report_hung = report_hung
        self._failure: EngineDeadError | None = None
        self._ready: CoreReady | None = None
        self._pid = 0

    def mark_ready(self, ready: CoreReady, pid: int) -> None:
        """Records that the core has started."""
        self._ready, self._pid = ready, pid

    @property
    def is_ready(self) -> bool:
        """Whether `mark_ready` has been called."""
        return self._ready is not None

    def set_failure(self, error: EngineDeadError) -> None:
        """Records that the core can no longer be used, from any thread. The first call counts."""
        if self._failure is None:
            self._failure = error
            self._stop.set()

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def failure(self) -> EngineDeadError | None:
        return self._failure

    @property
    def shared_step_age(self) -> float:
        if not self.is_open:
            return 0.0
        activity = self.activity
        return 0.0 if activity.step is None else activity.seconds

    def launch(self) -> None:
        pass

    def wait_ready(self) -> tuple[CoreReady, dict[str, float]]:
        assert self._ready is not None, "call mark_ready first"
        if not self._wait_connected(self.check_usable):
            raise EngineDeadError(
                f"The engine core (pid {self._pid}) has not connected within {self.unresponsive_timeout:g} s."
            )
        return self._ready, self._ready.start_seconds

    def kill_unresponsive(self) -> None:
        self._report_hung()


def _close_all(channel: ClientChannel, table: ActivityTable) -> None:
    channel.close()
    table.close()

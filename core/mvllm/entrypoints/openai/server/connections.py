"""The connections of one server process, fewer than its file descriptors.

A process without free descriptors accepts nobody, health probes included. So connections have a limit below that of
descriptors, and where it is reached, connections that wait for their client are closed: first those whose head of a
request has been on its way for a while, then those that have been answered, the oldest first.

    descriptors   | connections                        | for probes | everything else: the engine, files, pipes |
                  | heads on their way | idle | busy   |

If all are busy, a further connection is one of a few that are kept for health probes: any other request is refused
there with 503. Of those, the oldest is closed for a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import resource
import time
from typing import Protocol

from uvicorn.server import ServerState

from mvllm.logging import get_logger

logger = get_logger(__name__)

NUM_PROBE_CONNECTIONS = 32
REQUEST_HEAD_GRACE_SECONDS = 1.0
"""A connection whose head has been on its way for less is closed last: it may be about to arrive."""
_OTHER_DESCRIPTORS = 160
_MAX_DESCRIPTORS = 1 << 20
_MAX_LOOKS = 64
_LOG_SECONDS = 60.0


class Connection(Protocol):
    """What is known of a connection here."""

    transport: asyncio.Transport


class ConnectionTable(ServerState):
    """What the connections of one process share. Used in the event loop's thread.

    Args:
        max_connections: How many there may be, beside those for probes.
        num_for_probes: How many more answer health probes.
    """

    def __init__(self, max_connections: int, num_for_probes: int = NUM_PROBE_CONNECTIONS) -> None:
        super().__init__()
        self._max_connections = max_connections
        self._num_for_probes = num_for_probes
        self._reading_head: dict[Connection, float] = {}  # since when; oldest first
        self._idle: dict[Connection, None] = {}  # oldest first
        self._busy: set[Connection] = set()
        self._probe_only: dict[Connection, None] = {}  # oldest first
        self._shortage = RateLimitedWarning()

    def __len__(self) -> int:
        """Connections that answer every request."""
        return len(self._reading_head) + len(self._idle) + len(self._busy)

    def admit(self, connection: Connection) -> bool:
        """Takes note of a new connection; returns whether it is for more than probes. Others may be closed for it."""
        if len(self) >= self._max_connections:
            self._shortage.log(
                "All %d connections are in use. Connections that wait for their client are closed first; requests "
                "beyond them are refused with 503. Raise the limit of open files (ulimit -n), or run more API servers.",
                self._max_connections,
            )
            victim = self._find_evictable()
            if victim is None:
                if len(self._probe_only) >= self._num_for_probes:
                    self._close(next(iter(self._probe_only)))
                self._probe_only[connection] = None
                return False
            self._close(victim)
        self._reading_head[connection] = time.monotonic()
        return True

    def mark_reading_head(self, connection: Connection) -> None:
        """The head of a request is on its way."""
        if connection not in self._probe_only:
            self._untrack(connection)
            self._reading_head[connection] = time.monotonic()

    def mark_busy(self, connection: Connection) -> None:
        """It has a request that is to be answered."""
        if connection not in self._probe_only:
            self._untrack(connection)
            self._busy.add(connection)

    def mark_idle(self, connection: Connection) -> None:
        """It has been answered."""
        if connection not in self._probe_only:
            self._untrack(connection)
            self._idle[connection] = None

    def remove(self, connection: Connection) -> None:
        """It is closed. Idempotent."""
        self._untrack(connection)
        self._probe_only.pop(connection, None)

    def _find_evictable(self) -> Connection | None:
        """The connection to be closed for another, if one can be."""
        oldest = next(iter(self._reading_head), None)
        if oldest is not None and time.monotonic() - self._reading_head[oldest] >= REQUEST_HEAD_GRACE_SECONDS:
            return oldest
        for connection in itertools.islice(self._idle, _MAX_LOOKS):
            if not connection.transport.get_write_buffer_size():  # else its answer has not been read
                return connection
        return oldest

    def _close(self, connection: Connection) -> None:
        self.remove(connection)  # now: the transport tells of its end later
        connection.transport.abort()

    def _untrack(self, connection: Connection) -> None:
        self._reading_head.pop(connection, None)
        self._idle.pop(connection, None)
        self._busy.discard(connection)


class RateLimitedWarning:
    """A warning that clients can cause as often as they like: logged at once, then at most every minute."""

    def __init__(self) -> None:
        self._last = float("-inf")

    def log(self, text: str, *values: object) -> None:
        """Logs it, unless it has been logged a moment ago."""
        now = time.monotonic()
        if now - self._last >= _LOG_SECONDS:
            self._last = now
            logger.warning(text, *values)


def raise_descriptor_limit() -> None:
    """Lets this process, and those it starts, have as many descriptors as the system permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    while soft != resource.RLIM_INFINITY and wanted > soft:
        with contextlib.suppress(ValueError, OSError):  # some systems permit less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return
        wanted //= 2


def default_max_connections() -> int:
    """How many connections this process may have, beside those for probes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        soft = _MAX_DESCRIPTORS
    return max(soft - _OTHER_DESCRIPTORS - NUM_PROBE_CONNECTIONS, soft // 4, 1)

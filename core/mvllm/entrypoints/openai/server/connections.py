"""The connections of one server process, limited to fewer than its file descriptors.

A process without free descriptors cannot accept connections, health probes included. So connections have a lower limit.
At the limit, a new connection evicts one that waits for its client: first one whose request head has been incomplete
for a while, then an idle one, the oldest first.

    descriptors   | connections                        | for probes | the rest: the engine, files, pipes        |
                  | reading a head | idle | busy       |

If all are busy, a new connection is one of a few that only answer health probes, and refuse other requests with 503.
A new one evicts the oldest of these.
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
"""A connection that has been reading a head for less is evicted last."""
_OTHER_DESCRIPTORS = 160
_MAX_DESCRIPTORS = 1 << 20
_MAX_IDLE_CHECKED = 64
_LOG_SECONDS = 60.0


class Connection(Protocol):
    """The protocol object of a connection."""

    transport: asyncio.Transport


class ConnectionTable(ServerState):
    """The open connections of one process, by what they do. Used in the event loop's thread.

    Args:
        max_connections: Most connections, beside those for probes.
        num_for_probes: Most connections that only answer health probes.
    """

    def __init__(self, max_connections: int, num_for_probes: int = NUM_PROBE_CONNECTIONS) -> None:
        super().__init__()
        self._max_connections = max_connections
        self._num_for_probes = num_for_probes
        self._reading_head: dict[Connection, float] = {}  # with the time of the start; oldest first
        self._idle: dict[Connection, None] = {}  # oldest first
        self._busy: set[Connection] = set()
        self._probe_only: dict[Connection, None] = {}  # oldest first
        self._shortage = RateLimitedWarning()

    def __len__(self) -> int:
        """Number of connections, without those for probes."""
        return len(self._reading_head) + len(self._idle) + len(self._busy)

    def admit(self, connection: Connection) -> bool:
        """Adds a new connection, and may evict another; returns whether it may answer more than health probes."""
        if len(self) >= self._max_connections:
            self._shortage.log(
                "All %d connections are in use. New ones evict connections that wait for their client; if there are "
                "none, requests are refused with 503. Raise the limit of open files (ulimit -n), or run more API "
                "servers.",
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
        """The connection reads the head of a request."""
        if connection not in self._probe_only:
            self._untrack(connection)
            self._reading_head[connection] = time.monotonic()

    def mark_busy(self, connection: Connection) -> None:
        """The connection has a request to answer."""
        if connection not in self._probe_only:
            self._untrack(connection)
            self._busy.add(connection)

    def mark_idle(self, connection: Connection) -> None:
        """The connection waits for a request."""
        if connection not in self._probe_only:
            self._untrack(connection)
            self._idle[connection] = None

    def remove(self, connection: Connection) -> None:
        """Removes a closed connection. Idempotent."""
        self._untrack(connection)
        self._probe_only.pop(connection, None)

    def _find_evictable(self) -> Connection | None:
        """The connection to evict; None if all are busy."""
        oldest = next(iter(self._reading_head), None)
        if oldest is not None and time.monotonic() - self._reading_head[oldest] >= REQUEST_HEAD_GRACE_SECONDS:
            return oldest
        for connection in itertools.islice(self._idle, _MAX_IDLE_CHECKED):
            if not connection.transport.get_write_buffer_size():  # its response has been read
                return connection
        return oldest

    def _close(self, connection: Connection) -> None:
        self.remove(connection)  # now: connection_lost is called later
        connection.transport.abort()

    def _untrack(self, connection: Connection) -> None:
        self._reading_head.pop(connection, None)
        self._idle.pop(connection, None)
        self._busy.discard(connection)


class RateLimitedWarning:
    """A warning that is logged at most once a minute, because clients can cause it at will."""

    def __init__(self) -> None:
        self._last = float("-inf")

    def log(self, text: str, *values: object) -> None:
        """Logs the warning, unless it was logged less than a minute ago."""
        now = time.monotonic()
        if now - self._last >= _LOG_SECONDS:
            self._last = now
            logger.warning(text, *values)


def raise_descriptor_limit() -> None:
    """Raises the limit of open files of this process and its children to the most that the system permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    while soft != resource.RLIM_INFINITY and target > soft:
        with contextlib.suppress(ValueError, OSError):  # some systems permit less than the hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
            return
        target //= 2


def default_max_connections() -> int:
    """The most connections of this process, beside those for probes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        soft = _MAX_DESCRIPTORS
    return max(soft - _OTHER_DESCRIPTORS - NUM_PROBE_CONNECTIONS, soft // 4, 1)

"""Finds child processes that have stopped sending heartbeats.

The monitor checks at a fixed interval, and a check adds at most one interval to a process's silence. So the time during
which the monitor itself was stopped or slow, as on a suspended machine, does not count.
"""

from __future__ import annotations

from collections.abc import Sequence

HEARTBEAT_INTERVAL_SECONDS = 1.0
"""Seconds between two heartbeats of a process."""
_LONGEST_INTERVAL = 5.0
_CHECKS_PER_LIMIT = 10


class HeartbeatMonitor:
    """Measures how long each process has been silent.

    Args:
        limit: Seconds without a heartbeat after which a process counts as silent; 0 for never.
        num_processes: Number of processes.
        now: Time of the start, in seconds.
    """

    def __init__(self, limit: float, num_processes: int, now: float) -> None:
        self._limit = limit
        self._interval = min(limit / _CHECKS_PER_LIMIT, _LONGEST_INTERVAL)
        self._last_check = now
        self._last = [0.0] * num_processes
        self._silence = [0.0] * num_processes

    @property
    def poll_interval_ms(self) -> float | None:
        """Milliseconds between two checks; None if no checks are needed."""
        return self._interval * 1e3 or None

    def find_silent(self, heartbeats: Sequence[float], now: float) -> list[int]:
        """Indices of the processes that have been silent for longer than the limit.

        Args:
            heartbeats: A number for each process, which changes with each of its heartbeats.
            now: The time, in seconds.
        """
        elapsed = min(now - self._last_check, self._interval)
        self._last_check = now
        found = []
        for index, heartbeat in enumerate(heartbeats):
            if heartbeat != self._last[index]:
                self._last[index] = heartbeat
                self._silence[index] = 0.0
            else:
                self._silence[index] += elapsed
                if self._limit and self._silence[index] > self._limit:
                    found.append(index)
        return found

"""Notices which of several child processes does nothing any more: each is to give a sign of life now and then.

The idea: time counts as silence only while the observer itself runs. It looks at a fixed interval, and a look counts as
one interval at most. If the observer was stopped or slow as well, as on a suspended machine, nobody is to blame.
"""

from __future__ import annotations

from collections.abc import Sequence

HEARTBEAT_INTERVAL_SECONDS = 1.0
"""How often a process gives a sign of life."""
_LONGEST_INTERVAL = 5.0
_LOOKS = 10


class HeartbeatMonitor:
    """The observer's account.

    Args:
        limit: Seconds of silence that are too many; 0 for never.
        num_processes: How many are observed.
        now: Time of the start, in seconds.
    """

    def __init__(self, limit: float, num_processes: int, now: float) -> None:
        self._limit = limit
        self._interval = min(limit / _LOOKS, _LONGEST_INTERVAL)
        self._last_check = now
        self._last = [0.0] * num_processes
        self._silence = [0.0] * num_processes

    @property
    def poll_interval_ms(self) -> float | None:
        """Milliseconds between two looks; None where none is needed."""
        return self._interval * 1e3 or None

    def find_silent(self, signs: Sequence[float], now: float) -> list[int]:
        """Which processes have been silent for longer than the limit, by index.

        Args:
            signs: For each process something that is another number after each sign of life.
            now: The time, in seconds.
        """
        elapsed = min(now - self._last_check, self._interval)
        self._last_check = now
        found = []
        for index, sign in enumerate(signs):
            if sign != self._last[index]:
                self._last[index] = sign
                self._silence[index] = 0.0
            else:
                self._silence[index] += elapsed
                if self._limit and self._silence[index] > self._limit:
                    found.append(index)
        return found

"""The durations that responses of the Ollama API report, in nanoseconds."""

from __future__ import annotations

import time


class RequestDurations:
    """Times one request.

    Attributes:
        waited_ns: For how long the request has waited for its model before this server got it.
    """

    def __init__(self) -> None:
        self.waited_ns = 0
        self._start = self._loaded = time.monotonic_ns()

    def note_loaded(self) -> None:
        """The request has its model from now on."""
        self._loaded = time.monotonic_ns()

    def fields(self) -> dict[str, int]:
        """`total_duration` and `load_duration`, until now. Both are at least 1."""
        return {
            "total_duration": max(1, self.waited_ns + time.monotonic_ns() - self._start),
            "load_duration": max(1, self.waited_ns + self._loaded - self._start),
        }

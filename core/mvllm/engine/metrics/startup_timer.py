"""Times of the start-up phases, for one line of the log and `start_seconds`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from mvllm.logging import get_logger

logger = get_logger(__name__)

_FIRST_TOKEN = "first token"  # noqa: S105  a phase, not a secret


class StartupTimer:
    """Measures one start, from the construction of this object. Phases may overlap.

    Attributes:
        seconds: By phase, in the order in which they ended; `first token` starts with the first request.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._begun = time.perf_counter()
        self._first_request: float | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures the body of the `with` statement."""
        begun = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - begun  # not if it raises

    def finish(self, core_seconds: Mapping[str, float]) -> None:
        """Adds the phases of the engine core and logs all of them. Call when the engine is ready."""
        self.seconds.update(core_seconds)
        total = time.perf_counter() - self._begun
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())
        logger.info("Started in %.2f s: %s", total, phases)

    def record_first_request(self) -> None:
        """Records the time of the first request."""
        if self._first_request is None:
            self._first_request = time.perf_counter()

    def record_first_token(self) -> None:
        """Records the time of the first token."""
        if _FIRST_TOKEN not in self.seconds and self._first_request is not None:
            self.seconds[_FIRST_TOKEN] = time.perf_counter() - self._first_request
            logger.debug("First token %.3f s after the first request", self.seconds[_FIRST_TOKEN])

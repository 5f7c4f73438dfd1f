"""The clock of a run, which tests set, and work that is repeated while a run goes on."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Clock:
    """Two ways to read the time.

    Attributes:
        monotonic: Seconds since an arbitrary moment; never set back. Budgets and limits are measured with it.
        wall: Seconds since the epoch, for the rows.
        advances: Whether time passes. Otherwise nothing is cut off, in the items' own processes neither.
    """

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    advances: bool = True


SYSTEM = Clock()


class Repeated:
    """Does something every `seconds`.

    Args:
        act: What is done. An OSError (a file has vanished meanwhile, for instance) is left to the next call.
        seconds: Between two calls; the first one comes `seconds` after the start.
        clock: Measures them.
    """

    def __init__(self, act: Callable[[], None], seconds: float, clock: Clock = SYSTEM) -> None:
        self._act, self._seconds, self._clock = act, seconds, clock
        self._due = clock.monotonic() + seconds

    def poll(self) -> bool:
        """Does it if it is due; returns whether it was."""
        now = self._clock.monotonic()
        if now < self._due:
            return False
        self._due = now + self._seconds
        with contextlib.suppress(OSError):
            self._act()
        return True

    @contextlib.contextmanager
    def in_thread(self) -> Iterator[None]:
        """Polls in a thread as long as the context lasts, and does it once more at its end."""
        ended = threading.Event()

        def keep() -> None:
            while not ended.wait(min(POLL_SECONDS, self._seconds)):
                self.poll()

        thread = threading.Thread(target=keep, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self._act()

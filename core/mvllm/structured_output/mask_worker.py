"""When and where masks are computed, and how much work a sequence's masks may take.

A cheap mask takes some 50 us and is computed at once, on the engine core's thread, up to INLINE_SECONDS a step. Masks
of ambiguous grammars take up to a tenth of a second. They go to a thread of their own: the sequence takes part in no
step until its mask is there, and other sequences do not wait. Where the work is out of proportion to the tokens, the
sequence ends with an error.

The library holds Python's lock while it takes in a token (not while it computes a mask), which takes as long as the
mask did. The limit on work keeps that to some milliseconds, and while other sequences run, the thread pauses.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Iterator
from queue import Empty, PriorityQueue, SimpleQueue
from typing import Protocol

INLINE_SECONDS = 0.005
"""Masks of one step that are computed on the engine core's thread, all together."""

CHEAP_SECONDS = 0.0005
"""A mask that is expected to take longer is computed on the other thread."""

PAUSES = 3.0
"""Pause of the thread behind an expensive mask, in times of what that took, while other sequences run."""

FREE_SECONDS = 1.0
SECONDS_PER_TOKEN = 0.001
"""Processor time that the masks of a request may take: this much in all, and this much more for each token."""


class MaskTimeBudget:
    """Processor time that the masks of a request have taken, all of its sequences together.

    Both threads add to it. An addition that is lost now and then does no harm.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_tokens = 0

    def add_token(self, seconds: float) -> None:
        """Counts one token."""
        self.seconds += seconds
        self.num_tokens += 1

    @property
    def is_exceeded(self) -> bool:
        """Whether the work is out of proportion to the tokens."""
        return self.seconds > FREE_SECONDS + SECONDS_PER_TOKEN * self.num_tokens


class MaskJob(Protocol):
    """A sequence whose next mask is to be computed."""

    @property
    def expected_seconds(self) -> float:
        """Processor time that it will take, about."""

    @property
    def error(self) -> str | None:
        """Why the sequence cannot go on, if it cannot."""

    def compute_mask(self) -> None:
        """Takes in the last token and computes the mask. Raises nothing."""


class MaskWorker:
    """Has masks computed at once or on a thread of its own, which begins with the first that needs it.

    `run` and `begin_step` are called from one thread.

    Args:
        news: Set when a mask is there that was computed on the thread.
    """

    def __init__(self, news: threading.Event) -> None:
        self._results_ready = news
        self._no_other_sequence = threading.Event()
        self._inline_left: float | None = None
        self._jobs: PriorityQueue[tuple[float, int, weakref.ref[MaskJob] | None]] = PriorityQueue()
        self._numbers: Iterator[int] = itertools.count()
        self._failed: SimpleQueue[MaskJob] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin_step(self) -> None:
        """Masks may take INLINE_SECONDS of the caller's time from here on. Before the first call there is no limit."""
        self._inline_left = INLINE_SECONDS
        self._no_other_sequence.clear()

    def disable_pauses(self) -> None:
        """Says that no sequence can go on before a mask is there, until the next step begins."""
        self._no_other_sequence.set()

    def run(self, job: MaskJob) -> None:
        """Computes a mask, now or soon. A job that nobody refers to any more is dropped."""
        expected, left = job.expected_seconds, self._inline_left
        if left is None or expected <= min(CHEAP_SECONDS, left):
            start = time.perf_counter()
            job.compute_mask()
            if left is not None:
                self._inline_left = left - (time.perf_counter() - start)
            return
        self._jobs.put((expected, next(self._numbers), weakref.ref(job)))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="grammar-masks", daemon=True)
            self._thread.start()

    def pop_failed(self) -> list[MaskJob]:
        """Jobs of the thread that have ended in an error since the last call."""
        failed = []
        while True:
            try:
                failed.append(self._failed.get_nowait())
            except Empty:
                return failed

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._jobs.put((-1.0, next(self._numbers), None))

    def _work(self) -> None:
        while (reference := self._jobs.get()[2]) is not None:
            job = reference()
            if job is None:
                continue
            start = time.perf_counter()
            job.compute_mask()
            seconds = time.perf_counter() - start
            if job.error is not None:
                self._failed.put(job)
            del job  # nothing of a sequence that has ended is held while this waits
            self._results_ready.set()
            if seconds > CHEAP_SECONDS:
                self._no_other_sequence.wait(PAUSES * seconds)

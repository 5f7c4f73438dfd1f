"""Where token masks are computed, and a limit on the processor time for the masks of a request.

A cheap mask takes some 50 us and is computed on the engine core's thread, up to INLINE_SECONDS per step. Masks of
ambiguous grammars take up to a tenth of a second. They are computed on another thread: the sequence takes part in no
step until its mask is ready, and other sequences do not wait. A request whose masks take too much processor time for
the number of its tokens fails.

With asynchronous scheduling, a step that runs already waits for the masks of all its sequences. These are computed
together, on several threads: the library releases the GIL while it computes a mask.

The library holds the GIL while it consumes a token (not while it computes a mask), which takes about as long as the
mask did. The limit on processor time bounds that to some milliseconds, and while other sequences run, the thread
pauses.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, PriorityQueue, SimpleQueue
from typing import Protocol

INLINE_SECONDS = 0.025
"""Time for cheap masks on the engine core's thread in one step: those of some hundred sequences."""

CHEAP_SECONDS = 0.0005
"""A mask with a longer expected time is computed on the other thread."""

DRAFT_SECONDS = 0.01
"""Time for masks behind draft tokens on the engine core's thread in one step."""

PAUSES = 3.0
"""Pause of the thread after an expensive mask, as a multiple of that mask's time, while other sequences run."""

PARALLEL_SECONDS = 0.001
PARALLEL_MASK_SECONDS = 50e-6
"""Masks that are expected to take less, together or on average, are computed on the caller's thread alone: for small
ones, threads that wait for the GIL cost more than they save."""

MAX_THREADS = 8
"""Most threads that compute masks of a step together; at most on half of the cores, since the model needs the others.
"""

FREE_SECONDS = 1.0
SECONDS_PER_TOKEN = 0.001
"""Processor time that the masks of a request may take: FREE_SECONDS, and this much for each token."""


class MaskTimeBudget:
    """Processor time that the masks of a request have taken, all of its sequences together.

    Both threads add to it without a lock. A lost addition does no harm.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_tokens = 0

    def add_token(self, seconds: float) -> None:
        """Counts one token and the processor time of its mask."""
        self.seconds += seconds
        self.num_tokens += 1

    @property
    def is_exceeded(self) -> bool:
        """Whether the masks have taken too much processor time for the number of tokens."""
        return self.seconds > FREE_SECONDS + SECONDS_PER_TOKEN * self.num_tokens


class MaskJob(Protocol):
    """A sequence whose next mask has to be computed."""

    @property
    def expected_seconds(self) -> float:
        """Estimated processor time of the next mask."""

    @property
    def error(self) -> str | None:
        """Why the sequence has failed, if it has."""

    def compute_mask(self) -> None:
        """Consumes the last token and computes the mask. Raises nothing."""


def _num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _compute_all(jobs: deque[MaskJob]) -> None:
    """Computes masks until none is left. Several threads may take from one deque."""
    while True:
        try:
            job = jobs.popleft()
        except IndexError:
            return
        job.compute_mask()


class MaskWorker:
    """Computes masks on the caller's thread, or on its own thread, which starts with the first job that needs it.

    `run` and `begin_step` are called from one thread.

    Args:
        results_ready: Set when the thread has computed a mask.
    """

    def __init__(self, results_ready: threading.Event) -> None:
        self._results_ready = results_ready
        self._no_other_sequence = threading.Event()
        self._inline_left: float | None = None
        self._draft_left = DRAFT_SECONDS
        self._jobs: PriorityQueue[tuple[float, int, weakref.ref[MaskJob] | None]] = PriorityQueue()
        self._numbers: Iterator[int] = itertools.count()
        self._failed: SimpleQueue[MaskJob] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._deferred: list[MaskJob] = []
        self._num_helpers = min(MAX_THREADS, _num_cores() // 2) - 1
        self._helpers: ThreadPoolExecutor | None = None

    def begin_step(self) -> None:
        """Allows masks INLINE_SECONDS of the caller's time until the next call.

        Before the first call there is no limit.
        """
        self._inline_left, self._draft_left = INLINE_SECONDS, DRAFT_SECONDS
        self._no_other_sequence.clear()

    def has_draft_time(self, expected_seconds: float) -> bool:
        """Whether a mask behind a draft token may be computed on the caller's thread in this step."""
        return expected_seconds <= min(CHEAP_SECONDS, self._draft_left)

    def spend_draft_time(self, seconds: float) -> None:
        """Records the time of such a mask."""
        self._draft_left -= seconds

    def disable_pauses(self) -> None:
        """Lets the thread work without pauses until the next `begin_step`:

        no sequence can run before a mask is ready.
        """
        self._no_other_sequence.set()

    def run(self, job: MaskJob) -> None:
        """Computes a mask now, or later on the thread. A job without other references is dropped."""
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

    def defer(self, job: MaskJob) -> None:
        """Has `run_deferred` compute a mask."""
        self._deferred.append(job)

    def run_deferred(self) -> None:
        """Computes the masks of `defer`, on several threads if they take long together."""
        jobs, self._deferred = self._deferred, []
        if not jobs:
            return
        waiting = deque(jobs)
        helpers: list[Future[None]] = []
        limit = max(PARALLEL_SECONDS, PARALLEL_MASK_SECONDS * len(jobs))
        if self._num_helpers > 0 and len(jobs) > 1 and sum(job.expected_seconds for job in jobs) > limit:
            if self._helpers is None:
                self._helpers = ThreadPoolExecutor(self._num_helpers, thread_name_prefix="grammar-masks")
            helpers = [
                self._helpers.submit(_compute_all, waiting) for _ in range(min(self._num_helpers, len(jobs) - 1))
            ]
        _compute_all(waiting)
        for helper in helpers:
            if not helper.cancel():  # one that has not started has nothing left to do
                helper.result()
        for job in jobs:
            if job.error is not None:
                self._failed.put(job)

    def pop_failed(self) -> list[MaskJob]:
        """Jobs of other threads and of `run_deferred` that have failed since the last call."""
        failed = []
        while True:
            try:
                failed.append(self._failed.get_nowait())
            except Empty:
                return failed

    def close(self) -> None:
        """Ends the threads. Idempotent."""
        self._jobs.put((-1.0, next(self._numbers), None))
        if self._helpers is not None:
            self._helpers.shutdown(wait=False)

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
            del job  # so that the sequence is freed while the thread waits for the next job
            self._results_ready.set()
            if seconds > CHEAP_SECONDS:
                self._no_other_sequence.wait(PAUSES * seconds)

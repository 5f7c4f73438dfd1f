"""Runs items in processes of their own, within a time limit, and records every result.

    parent ── python -m tests.gpu.child PART SETTINGS DONE ──> rows.jsonl, DONE, logs/PART.log
       └───── standard input: seconds for the next item, and its name, once the one before is in DONE

A child runs one item after the other. One that ends in between (a device that failed takes its process along), fails in
a way that may have left the device in disorder, or is too slow, costs the item that it was at: the next item gets a
process of its own.

Parts in which nothing is timed may have several children side by side, which take items from the same list: most of
what they take is the time of compilers, which one process would spend one after the other.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.clock import SYSTEM, Clock
from tests.gpu.result_log import FAILED, NOT_RUN, ResultLog, Row, one_line
from tests.gpu.settings import ROOT, Item, Settings

DONE, FRESH_PROCESS_NEEDED = "done", "fresh process needed"
"""What a child reports about an item that came to its end; after the second it takes no other."""
GRACE = 10.0  # seconds between asking a child to end and making it


@dataclass(frozen=True)
class Lane:
    """One of several children that run side by side.

    Attributes:
        number: Of it.
        among: How many there are.
    """

    number: int = 0
    among: int = 1

    def file(self, folder: Path, name: str) -> Path:
        """A file of its own."""
        stem, _, ending = name.partition(".")
        return folder / (name if self.among == 1 else f"{stem}-{self.number}.{ending}")

    def environment(self) -> dict[str, str]:
        """Variables of its child: processors are shared."""
        if self.among == 1:
            return dict(os.environ)
        return {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self.among))}


class Runner:
    """Runs items of parts, within the budget of a run.

    Args:
        settings: Of the run; its deadline is one of `clock`.
        result_log: Gets the rows.
        clock: Measures the budget and the limits of items.
    """

    def __init__(self, settings: Settings, result_log: ResultLog, clock: Clock = SYSTEM) -> None:
        self._settings, self._result_log, self._clock = settings, result_log, clock

    def run(
        self, part: str, items: Sequence[Item], side_by_side: int = 1, *, seconds: float = math.inf
    ) -> tuple[Item, ...]:
        """Runs items in order. Those with an obstacle get a row that says so.

        Args:
            side_by_side: Number of processes.
            seconds: No item is started after them, or that is known to need more than is left of them.

        Returns:
            The items that were not started because there was no time. They have no row.
        """
        until = self._clock.monotonic() + seconds
        queue = deque(item for item in items if self._settings.wants(item.name))
        late: list[Item] = []
        lanes = [Lane(number, side_by_side) for number in range(side_by_side)]
        threads = [
            threading.Thread(target=self._run_lane, args=(part, queue, late, until, lane), daemon=True)
            for lane in lanes[1:]
        ]
        for thread in threads:
            thread.start()
        self._run_lane(part, queue, late, until, lanes[0])
        for thread in threads:
            thread.join()
        return tuple(item for item in items if item in late)

    def report_not_run(self, part: str, items: Sequence[Item]) -> None:
        """Adds a row for each item that the budget did not reach."""
        left = max(0.0, self._settings.seconds_left(self._clock))
        for item in items:
            note = f"{left:.0f} s left, it needs about {item.needs:.0f} s"
            self._result_log.add(Row(part, item.name, item.name, NOT_RUN, note=note))

    def _run_lane(self, part: str, queue: deque[Item], late: list[Item], until: float, lane: Lane) -> None:
        child: _Child | None = None
        try:
            while True:
                try:
                    item = queue.popleft()
                except IndexError:  # also where another lane took the last one
                    return
                if item.obstacle:
                    self._result_log.add(Row(part, item.name, item.name, NOT_RUN, note=item.obstacle))
                    continue
                now = self._clock.monotonic()
                if item.needs > min(until, self._settings.deadline) - now:
                    late.append(item)
                    continue
                child = child or _Child(part, self._settings, self._clock, lane)
                status, problem = child.run(item)
                if problem:
                    self._result_log.add(Row(part, item.name, item.name, status, note=problem))
                else:
                    self._result_log.mark_done(part, item.name)
                if status != DONE:
                    child.end(idle=not problem)
                    child = None
        finally:
            if child is not None:
                child.end(idle=sys.exc_info()[0] is None)


class _Child:
    """A process that runs items of one part. Started by the first of them."""

    def __init__(self, part: str, settings: Settings, clock: Clock, lane: Lane) -> None:
        self._settings, self._clock = settings, clock
        self._done = lane.file(settings.out, "done.txt")
        self._done.write_text("")
        self._num_done = 0
        logs = settings.out / "logs"
        logs.mkdir(exist_ok=True)
        self._log = lane.file(logs, f"{part.rpartition('.')[2]}.log")
        command = [sys.executable, "-m", "tests.gpu.child", part, settings.to_json(), str(self._done)]
        with self._log.open("ab") as output:
            self._begun = output.tell()
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=lane.environment(), stdin=subprocess.PIPE, stderr=output, process_group=0
            )

    def run(self, item: Item) -> tuple[str, str]:
        """Runs an item until it is done, the process ends, or it takes too long.

        Returns:
            DONE or FRESH_PROCESS_NEEDED without a problem; else the status of the item's row, and the problem.
        """
        assert self._process.stdin is not None
        since = self._clock.monotonic()
        with contextlib.suppress(BrokenPipeError):  # it has ended: seen below
            left = min(self._settings.seconds_left(self._clock), item.limit) if self._clock.advances else math.inf
            self._process.stdin.write(f"{left} {item.name}\n".encode())
            self._process.stdin.flush()
        while True:
            ended = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                ended = self._process.wait(0.1)
            reports = self._done.read_text().split("\n")[:-1]
            if len(reports) > self._num_done:
                self._num_done += 1
                return reports[-1], ""
            if ended is not None:
                return FAILED, self._with_last_line(f"its process ended with status {ended}")
            if self._clock.monotonic() - since > item.limit:
                return FAILED, self._with_last_line(f"not done after {item.limit:.0f} s")
            if self._settings.seconds_left(self._clock) <= 0:
                return NOT_RUN, self._with_last_line("the budget was over before it was done")

    def end(self, *, idle: bool = False) -> None:
        """Ends it with all that it has started. One that is `idle` ends by itself, with what it does at its end."""
        assert self._process.stdin is not None
        if idle:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE)
        end(self._process)

    def _with_last_line(self, problem: str) -> str:
        with self._log.open("rb") as written:
            written.seek(self._begun)
            said = written.read().decode(errors="replace").strip().splitlines()
        return f"{problem}; last line: {one_line(said[-1], 200)}" if said else problem


def end(child: subprocess.Popen[bytes]) -> None:
    """Ends a child with all that it has started."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    if child.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()

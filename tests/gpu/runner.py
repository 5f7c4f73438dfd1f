"""Runs items in processes of their own, within a time limit, and records every result.

    parent ── python -m tests.gpu.child PART SETTINGS DONE ITEM ITEM ... ──> rows.jsonl, DONE, logs/PART.log

A child takes items in order and says when each is done. One that ends in between (a device that failed takes its
process along), fails in a way that may have left the device in disorder, or is too slow, costs the item that it was at:
the next child goes on behind it.

Parts in which nothing is timed may have several children side by side, each with its share of the items: most of what
they take is the time of compilers, which one process would spend one after the other.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.result_log import FAILED, NOT_RUN, ResultLog, Row, one_line
from tests.gpu.settings import ROOT, Item, Settings

FRESH_PROCESS_NEEDED = 3  # exit status of a child whose last item is done, and that no other should follow in it
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


def run_items(
    part: str, items: Sequence[Item], settings: Settings, result_log: ResultLog, side_by_side: int = 1
) -> None:
    """Runs what the budget allows; the rest gets rows that say so."""
    wanted = [item for item in items if settings.wants(item.name)]
    lanes = [Lane(number, side_by_side) for number in range(side_by_side)]
    if side_by_side == 1:
        _run_in_turn(part, wanted, settings, result_log, lanes[0])
        return
    threads = [
        threading.Thread(
            target=_run_in_turn,
            args=(part, wanted[lane.number :: side_by_side], settings, result_log, lane),
            daemon=True,
        )
        for lane in lanes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _run_in_turn(part: str, items: Sequence[Item], settings: Settings, result_log: ResultLog, lane: Lane) -> None:
    done_file = lane.file(settings.out, "done.txt")
    left = list(items)
    while left:
        if settings.seconds_left() < left[0].needs:
            result_log.add(_not_run(part, left.pop(0), settings))
            continue
        batch = _batch(left, settings.seconds_left())
        done_file.write_text("")
        status, problem = _run_child(part, batch, settings, done_file, lane)
        done = set(done_file.read_text().splitlines())
        for item in left:
            if item.name in done:
                result_log.mark_done(part, item.name)
        left = [item for item in left if item.name not in done]
        if problem and left and left[0] in batch:
            result_log.add(Row(part, left[0].name, left[0].name, status, note=problem))
            left.pop(0)


def _batch(left: Sequence[Item], seconds: float) -> list[Item]:
    """Those that one child may take: as long as their needs, one behind the other, are within the budget."""
    batch: list[Item] = []
    for item in left:
        if sum(other.needs for other in batch) + item.needs > seconds:
            break
        batch.append(item)
    return batch


def _run_child(part: str, batch: Sequence[Item], settings: Settings, done_file: Path, lane: Lane) -> tuple[str, str]:
    """Runs items until they are done, the child ends or an item takes too long.

    Returns:
        What becomes of the item that it was at, and why; two empty texts where nothing went wrong.
    """
    logs = settings.out / "logs"
    logs.mkdir(exist_ok=True)
    log = lane.file(logs, f"{part.rpartition('.')[2]}.log")
    names = [item.name for item in batch]
    command = [sys.executable, "-m", "tests.gpu.child", part, settings.to_json(), str(done_file), *names]
    with log.open("ab") as output:
        begun = output.tell()
        child = subprocess.Popen(
            command, cwd=ROOT, env=lane.environment(), stdin=subprocess.DEVNULL, stderr=output, process_group=0
        )
    try:
        status, problem = _watch(child, batch, settings, done_file)
    finally:
        end(child)
    if problem:
        with log.open("rb") as written:
            written.seek(begun)
            said = written.read().decode(errors="replace").strip().splitlines()
        problem = f"{problem}; last line: {one_line(said[-1], 200)}" if said else problem
    return status, problem


def _watch(
    child: subprocess.Popen[bytes], batch: Sequence[Item], settings: Settings, done_file: Path
) -> tuple[str, str]:
    limits = {item.name: item.limit for item in batch}
    done, since = 0, time.time()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = child.wait(0.2)
            names = done_file.read_text().split("\n")[:-1]
            fine = status == FRESH_PROCESS_NEEDED or (status == 0 and len(names) == len(batch))
            return ("", "") if fine else (FAILED, f"its process ended with status {status}")
        names = done_file.read_text().split("\n")[:-1]
        if len(names) > done:
            done, since = len(names), time.time()
        if done < len(batch) and time.time() - since > limits[batch[done].name]:
            return FAILED, f"not done after {limits[batch[done].name]:.0f} s"
        if settings.seconds_left() <= 0:
            return NOT_RUN, "the budget was over before it was done"


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


def _not_run(part: str, item: Item, settings: Settings) -> Row:
    left = max(0.0, settings.seconds_left())
    note = f"{left:.0f} s of the budget were left, it needs {item.needs:.0f}"
    return Row(part, item.name, item.name, NOT_RUN, note=note)

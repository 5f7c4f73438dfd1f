"""The activity of each worker, in shared memory that stays readable while a worker hangs and after its death.

One page holds one row per rank. The rank writes it, and the executor reads it for error messages and log lines, which
then say *what a rank was doing*; a worker that starts is late by the time of its activity, and of several late workers
the oldest activity is named first. A read beside a write may mix the fields of two activities.

    byte 64 * rank   request id | since (monotonic clock, seconds) | step or -1 | activity (40 bytes of UTF-8)

The memory has no name: its descriptor is inherited, so no process leaves it behind.
"""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass

from mvllm.executor.process.shared_memory import SharedMemory

_ROW = struct.Struct("=Qdq40s")
assert _ROW.size == 64

STARTING = "starting the interpreter"
IDLE = "idle"


@dataclass(frozen=True)
class Activity:
    """The activity of a rank at the time of reading.

    Attributes:
        text: The name of a WorkerProtocol method, or a phase of the start.
        step: The step, for `execute_model`; None otherwise.
        request_id: The current request, or the last one.
        seconds: The time since the activity began.
    """

    text: str
    step: int | None
    request_id: int
    seconds: float

    def __str__(self) -> str:
        return self.text if self.step is None else f"{self.text} of step {self.step}"

    def during(self) -> str:
        """A phrase for an error about the end of the process: `during load_model (2.0 s into it)`."""
        return "while it was idle" if self.is_idle else f"during {self} ({self.seconds:.1f} s into it)"

    @property
    def is_idle(self) -> bool:
        return self.text == IDLE


class ActivityTable(SharedMemory):
    """The shared memory, one row per rank.

    Args:
        fd: Its descriptor, closed by `close`.
    """

    @classmethod
    def create(cls, num_ranks: int) -> ActivityTable:
        """A table in which every rank is starting."""
        table = cls.allocate("status", max(mmap.PAGESIZE, num_ranks * _ROW.size), is_reserved=True)
        for rank in range(num_ranks):
            table.write(rank, STARTING)
        return table

    def write(self, rank: int, text: str, request_id: int = 0, step: int = -1) -> None:
        """Sets the activity of `rank`, which begins now."""
        # pack_into would set the row to zeros first: who reads it then would see an activity as old as the machine.
        row = _ROW.pack(request_id, time.monotonic(), step, text.encode())
        self._map[rank * _ROW.size : (rank + 1) * _ROW.size] = row

    def write_idle(self, rank: int, request_id: int = 0) -> None:
        """Sets `rank` idle; `request_id` is the last request that it has answered."""
        self.write(rank, IDLE, request_id)

    def read(self, rank: int) -> Activity:
        """The activity of `rank`."""
        request_id, since, step, text = _ROW.unpack_from(self._map, rank * _ROW.size)
        return Activity(
            text.rstrip(b"\0").decode(errors="replace"),
            None if step < 0 else step,
            request_id,
            max(0.0, time.monotonic() - since),
        )

    def since(self, rank: int) -> float:
        """When the activity of `rank` began, in seconds of the monotonic clock."""
        since: float = _ROW.unpack_from(self._map, rank * _ROW.size)[1]
        return since

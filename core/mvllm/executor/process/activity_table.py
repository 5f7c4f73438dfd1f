"""What each worker is doing right now, readable while it hangs and after it died.

The idea: one page of shared memory, one line per rank, written by the rank and read by the executor when something has
gone wrong. Nothing is decided by it; it only makes errors say *what a rank was doing* instead of *that it is silent*.

    byte 64 * rank   request id | since (monotonic clock, seconds) | step or -1 | activity (40 bytes of UTF-8)

The memory has no name. Its descriptor is inherited, so nothing is left behind whoever is killed.
"""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass

from mvllm.executor.process.shared_memory import SharedMemory

_LINE = struct.Struct("=Qdq40s")
assert _LINE.size == 64

STARTING = "starting the interpreter"
IDLE = "idle"


@dataclass(frozen=True)
class Activity:
    """What a rank was doing when the board was read.

    Attributes:
        text: The name of a WorkerProtocol method, or a phase of start-up.
        step: The step, for `execute_model`.
        request_id: The request it works on, or the last one.
        seconds: For how long.
    """

    text: str
    step: int | None
    request_id: int
    seconds: float

    def __str__(self) -> str:
        return self.text if self.step is None else f"{self.text} of step {self.step}"

    def during(self) -> str:
        """For sentences about an end: when it came."""
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
        table = cls.allocate("status", max(mmap.PAGESIZE, num_ranks * _LINE.size), is_reserved=True)
        for rank in range(num_ranks):
            table.write(rank, STARTING)
        return table

    def write(self, rank: int, text: str, request_id: int = 0, step: int = -1) -> None:
        """Says what `rank` does from now on."""
        _LINE.pack_into(self._map, rank * _LINE.size, request_id, time.monotonic(), step, text.encode())

    def write_idle(self, rank: int, request_id: int = 0) -> None:
        """Says that `rank` waits for requests, and which one it has answered last."""
        self.write(rank, IDLE, request_id)

    def read(self, rank: int) -> Activity:
        """What `rank` said last."""
        request_id, since, step, text = _LINE.unpack_from(self._map, rank * _LINE.size)
        return Activity(
            text.rstrip(b"\0").decode(errors="replace"),
            None if step < 0 else step,
            request_id,
            max(0.0, time.monotonic() - since),
        )

    def since(self, rank: int) -> float:
        """When `rank` said that, by the monotonic clock, in seconds."""
        since: float = _LINE.unpack_from(self._map, rank * _LINE.size)[1]
        return since

"""Fault injection: parses the environment variable FAULT_INJECTION and triggers its faults.

    FAULT_INJECTION="raise@execute:rank=1,step=3"     one fault; several are separated by semicolons
    FAULT_INJECTION="none"                            the platform is there, and nothing goes wrong

    what      raise | hang | spin | exit | nan | oom | slow | poor
    phase     init_device | load | execute | memory
    rank      the worker that fails (default 0; -1 means all)
    step      for execute: which step, counting from 0 (default 0)
    seconds   for slow: how long each step from then on waits (default 1); for hang: how long (default an hour)
    status    for exit: the exit status (default 3)
    free      for poor: the bytes of memory that the rank says are free (default 0)

`hang` sleeps, `spin` burns the processor in Python; `nan` makes the attention of that step give NaN, `oom` leaves it no
memory; `poor@memory` has a rank report less memory than the others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

VARIABLE = "FAULT_INJECTION"

_KINDS = ("raise", "hang", "spin", "exit", "nan", "oom", "slow", "poor")
_PHASES = ("init_device", "load", "execute", "memory")


class InjectedFault(RuntimeError):
    """The error that `raise` raises."""


@dataclass(frozen=True)
class Fault:
    """One fault. See the module."""

    kind: str
    phase: str
    rank: int = 0
    step: int = 0
    seconds: float | None = None
    status: int = 3
    free: int = 0

    @classmethod
    def parse(cls, text: str) -> Fault:
        head, _, options = text.partition(":")
        kind, _, phase = head.partition("@")
        if kind not in _KINDS or phase not in _PHASES:
            raise ValueError(
                f"{VARIABLE}: {text!r} should be <{'|'.join(_KINDS)}>@<{'|'.join(_PHASES)}>[:key=value,...]"
            )
        values = dict(option.split("=", 1) for option in options.split(",") if option)
        return cls(
            kind,
            phase,
            rank=int(values.pop("rank", 0)),
            step=int(values.pop("step", 0)),
            seconds=float(values.pop("seconds")) if "seconds" in values else None,
            status=int(values.pop("status", 3)),
            free=int(values.pop("free", 0)),
        )

    def applies(self, phase: str, rank: int, step: int) -> bool:
        if phase != self.phase or self.rank not in (rank, -1):
            return False
        return step == self.step or (self.kind == "slow" and step > self.step)

    def happen(self, rank: int) -> None:
        """Does it; returns for `slow`, and for what the platform does itself: `nan`, `oom`."""
        if self.kind == "raise":
            raise InjectedFault(f"injected into {self.phase} of rank {rank}")
        if self.kind == "exit":
            os._exit(self.status)
        if self.kind == "slow":
            time.sleep(1.0 if self.seconds is None else self.seconds)
        elif self.kind in ("hang", "spin"):
            until = time.monotonic() + (3600.0 if self.seconds is None else self.seconds)
            while time.monotonic() < until:
                if self.kind == "hang":
                    time.sleep(until - time.monotonic())


class FaultPlan:
    """The faults of this process. Counts its steps.

    Attributes:
        rank: Set when the device is bound.
        poisoned, starved: Whether this step is to give NaN, or to find no memory.
    """

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = faults
        self._next_step = 0
        self.rank = 0
        self.poisoned = self.starved = False

    @classmethod
    def from_environment(cls) -> FaultPlan:
        text = os.environ.get(VARIABLE, "none")
        return cls([Fault.parse(part) for part in text.split(";") if part and part != "none"])

    def reach(self, phase: str, step: int = 0) -> None:
        """Lets happen what is to happen here."""
        due = [fault for fault in self._faults if fault.applies(phase, self.rank, step)]
        self.poisoned = any(fault.kind == "nan" for fault in due)
        self.starved = any(fault.kind == "oom" for fault in due)
        for fault in due:
            fault.happen(self.rank)

    def free_memory(self, really: int) -> int:
        """The free bytes that this rank reports."""
        return min([really, *(f.free for f in self._faults if f.kind == "poor" and f.applies("memory", self.rank, 0))])

    def begin_step(self) -> None:
        """Counts one step and lets its faults happen."""
        step, self._next_step = self._next_step, self._next_step + 1
        self.reach("execute", step)

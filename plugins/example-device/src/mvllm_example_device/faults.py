"""Fault injection: parses the environment variable FAULT_INJECTION and triggers its faults.

    FAULT_INJECTION="raise@execute:rank=1,step=3"     one fault; several are separated by semicolons
    FAULT_INJECTION="none"                            the platform is available, without faults

    kind      raise | hang | spin | exit | nan | oom | slow | poor
    phase     init_device | load | execute | memory
    rank      the worker that fails (default 0; -1 means all)
    step      for execute: which step, counting from 0 (default 0)
    seconds   for slow: delay of each step from then on (default 1); for hang: its duration (default an hour)
    status    for exit: the exit status (default 3)
    free      for poor: the free bytes that the rank reports (default 0)

`hang` sleeps, `spin` runs a busy loop in Python; `nan` makes the attention of that step return NaN, `oom` leaves it no
memory; `poor@memory` makes a rank report less memory than the others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

VARIABLE = "FAULT_INJECTION"

_KINDS = ("raise", "hang", "spin", "exit", "nan", "oom", "slow", "poor")
_PHASES = ("init_device", "load", "execute", "memory")


class InjectedFault(RuntimeError):
    """The error that `raise` raises."""


@dataclass(frozen=True)
class Fault:
    """One fault; see the module."""

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
        of: dict[str, Any] = {"rank": int, "step": int, "seconds": float, "status": int, "free": int}
        values = dict(option.split("=", 1) for option in options.split(",") if option)
        if unknown := values.keys() - of.keys():
            raise ValueError(f"{VARIABLE}: {text!r} has unknown keys: {', '.join(sorted(unknown))}")
        return cls(kind, phase, **{key: of[key](value) for key, value in values.items()})

    def applies(self, phase: str, rank: int, step: int) -> bool:
        if phase != self.phase or self.rank not in (rank, -1):
            return False
        return step == self.step or (self.kind == "slow" and step > self.step)

    def happen(self, rank: int) -> None:
        """Triggers the fault. Returns for `slow`, and for `nan` and `oom`, which the platform implements."""
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
    """The faults of this process, with a count of its steps.

    Attributes:
        rank: Set when the device is bound.
        poisoned, starved: Whether this step returns NaN, or has no memory.
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
        """Triggers the faults of a phase."""
        due = [fault for fault in self._faults if fault.applies(phase, self.rank, step)]
        self.poisoned = any(fault.kind == "nan" for fault in due)
        self.starved = any(fault.kind == "oom" for fault in due)
        for fault in due:
            fault.happen(self.rank)

    def free_memory(self, actual: int) -> int:
        """The free bytes that this rank reports, given the actual ones."""
        return min([actual, *(f.free for f in self._faults if f.kind == "poor" and f.applies("memory", self.rank, 0))])

    def begin_step(self) -> None:
        """Counts a step and triggers its faults."""
        step, self._next_step = self._next_step, self._next_step + 1
        self.reach("execute", step)

"""Which part of the engine a process plays, so that a platform can refuse to be called from the wrong one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from mvllm.errors import ContractError


class Phase(Enum):
    """When, and in which process, a method of the contract may be called. `current_phase` gives the thread's."""

    PROBE = "probe"
    """Any process, before a platform is chosen."""
    FRONTEND = "frontend"
    """The process of the caller: plan, topology, doctor. No device is opened."""
    ENGINE = "engine"
    """The process of the scheduler. No device is opened."""
    WORKER = "worker"
    """The process that owns a device."""


_local = threading.local()


@contextmanager
def enter_phase(phase: Phase) -> Iterator[None]:
    """Marks the calls made inside as belonging to `phase`. Core only."""
    before = current_phase()
    _local.phase = phase
    try:
        yield
    finally:
        _local.phase = before


def current_phase() -> Phase | None:
    """The phase that this thread is in, or None outside the engine (in a vendor's own test, say)."""
    return getattr(_local, "phase", None)


def require_phase(*allowed: Phase) -> None:
    """Fails unless the caller is in one of `allowed`, or outside the engine.

    Raises:
        ContractError: Core called a platform method in a phase where the contract forbids it.
    """
    phase = current_phase()
    if phase is not None and phase not in allowed:
        names = ", ".join(p.value for p in allowed)
        raise ContractError(f"A platform method of phase {names} was called in phase {phase.value}.")

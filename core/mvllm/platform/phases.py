"""The phases of the platform contract, and checks of the phase that a thread is in."""

from __future__ import annotations

import threading
from enum import Enum

from mvllm.errors import ContractError


class Phase(Enum):
    """When, and in which process, core calls a method of the contract. `current_phase` returns the thread's phase."""

    PROBE = "probe"
    """Any process, before a platform is chosen."""
    FRONTEND = "frontend"
    """The process of the caller: plan, topology, doctor. No device is opened."""
    ENGINE = "engine"
    """The process of the scheduler. No device is opened."""
    WORKER = "worker"
    """The process that owns a device."""


_local = threading.local()


class enter_phase:
    """A context that sets the phase of the thread's calls inside it. Core only.

    A class, since every step enters it: a generator takes several times as long.

    Args:
        phase: The phase.
    """

    def __init__(self, phase: Phase) -> None:
        self._phase = phase

    def __enter__(self) -> None:
        self._before = current_phase()
        _local.phase = self._phase

    def __exit__(self, *error: object) -> None:
        _local.phase = self._before


def current_phase() -> Phase | None:
    """The phase of this thread, or None outside the engine (for instance in a vendor's test)."""
    return getattr(_local, "phase", None)


def require_phase(*allowed: Phase) -> None:
    """Raises an error unless the thread is in one of the phases `allowed`, or outside the engine.

    Raises:
        ContractError: Core called a platform method in another phase.
    """
    phase = current_phase()
    if phase is not None and phase not in allowed:
        names = ", ".join(p.value for p in allowed)
        raise ContractError(f"A platform method of phase {names} was called in phase {phase.value}.")

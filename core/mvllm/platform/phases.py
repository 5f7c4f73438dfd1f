"""The phase of the platform contract that a thread is in, and checks of it."""

from __future__ import annotations

import threading

from mvllm.contract import Phase as Phase
from mvllm.errors import ContractError

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

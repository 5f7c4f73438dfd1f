"""Marks in the source of the platform contract: the phases in which core calls a method, and what may be left out.

`mvllm contract` reads the marks from the source. At run time, `is_optional` finds those of `optional`; the others
change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TypeVar

_Marked = TypeVar("_Marked")
_OPTIONAL = "_is_optional"


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


ANY = "any"
"""Every phase."""
ANY_PROCESS = "any process"
"""Every process that lists platforms, before one is chosen, too."""


def phase(*when: Phase | str) -> Callable[[_Marked], _Marked]:
    """Marks a method with the phases in which core calls it, a class with those of its methods, or a value with those
    in which it is passed.

    Args:
        when: Phases, or ANY or ANY_PROCESS alone.
    """

    def mark(marked: _Marked) -> _Marked:
        return marked

    return mark


def optional(method: _Marked) -> _Marked:
    """Marks a method of a protocol that a class may leave out; its docstring says what core does then."""
    setattr(method, _OPTIONAL, True)
    return method


def is_optional(method: object) -> bool:
    """Whether a method is marked by `optional`."""
    return getattr(method, _OPTIONAL, False) is True

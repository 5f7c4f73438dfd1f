"""Environment variables that a worker's libraries read when they are loaded. Variables set by the user stay.

THP_MEM_ALLOC_ENABLE makes torch request huge pages for tensors of two megabytes or more. Allocating memory in small
pages takes longer than filling it, and reading a weight in huge pages needs fewer address translations.

GOMP_SPINCOUNT limits how long OpenMP threads spin after an operation of torch. They would occupy the cores that the
kernels' own threads (csrc/thread_team.cpp) need next.
"""

from __future__ import annotations

import os

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
SPIN_COUNT = "GOMP_SPINCOUNT"
_SPINS = "1000"
"""Spins for some tens of microseconds."""


def worker_variables_for_threads(threads: int) -> dict[str, str]:
    """The variables of a worker that computes with `threads` threads."""
    chosen = {"OMP_NUM_THREADS": str(threads)}
    if HUGE_PAGES not in os.environ:
        chosen[HUGE_PAGES] = "1"
    if SPIN_COUNT not in os.environ and "OMP_WAIT_POLICY" not in os.environ:
        chosen[SPIN_COUNT] = _SPINS
    return chosen

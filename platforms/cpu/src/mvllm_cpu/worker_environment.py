"""Environment variables that a worker's libraries read when they are loaded. Variables set by the user stay.

THP_MEM_ALLOC_ENABLE has torch ask for huge pages: tensors of two megabytes and more then come in pages of that size.
Claiming memory in small pages takes longer than filling it, and a weight in huge pages is read with fewer translations.

GOMP_SPINCOUNT limits how long the threads of OpenMP spin after an operation of torch. They would take the cores from
the kernels' own threads (csrc/thread_team.cpp), which compute next.
"""

from __future__ import annotations

import os

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
SPIN_COUNT = "GOMP_SPINCOUNT"
_SPINS = "1000"
"""Some tens of microseconds."""


def worker_variables_for_threads(threads: int) -> dict[str, str]:
    """The variables of a worker that computes with `threads` threads."""
    chosen = {"OMP_NUM_THREADS": str(threads)}
    if HUGE_PAGES not in os.environ:
        chosen[HUGE_PAGES] = "1"
    if SPIN_COUNT not in os.environ and "OMP_WAIT_POLICY" not in os.environ:
        chosen[SPIN_COUNT] = _SPINS
    return chosen

"""Markers of the suite's tests: the clauses that a test covers, and reasons of skipped tests.

@clause("ATT-02", needs="sliding_window")
def test_a_window_hides_what_lies_before_it(...): ...

@clause("ATT-08", refusal=True)              runs if soft_cap is *not* claimed: core must refuse it
def test_soft_cap_that_is_not_claimed_is_refused(...): ...
"""

from __future__ import annotations

from typing import NoReturn

import pytest

from mvllm_conformance.clauses import CLAUSES

MARKER = "mvllm_clause"
EXHAUSTIVE_MARKER = "mvllm_exhaustive"

NOT_CLAIMED, NOT_APPLICABLE, NOT_RUN = "not claimed: ", "not applicable: ", "not run: "
"""Prefixes of the reasons of skipped tests."""

exhaustive = pytest.mark.mvllm_exhaustive
"""Marks a case that `--quick` leaves out: another value of a grid."""


def clause(*ids: str, needs: str | None = None, refusal: bool = False) -> pytest.MarkDecorator:
    """Marks the clauses that a test covers.

    Args:
        ids: Ids of the clauses.
        needs: A capability that the test needs in addition to those that the clauses need.
        refusal: The test runs if the needed capabilities are not claimed, and expects core to refuse their use.
    """
    unknown = [i for i in ids if i not in CLAUSES]
    if unknown or not ids:
        raise ValueError(f"There are no clauses {unknown}; mvllm.testing.clauses lists them.")
    return pytest.mark.mvllm_clause(*ids, needs=needs, refusal=refusal)


def skip_not_claimed(what: str) -> NoReturn:
    """Skips a test whose subject the platform does not claim."""
    pytest.skip(NOT_CLAIMED + what)


def skip_not_run(why: str) -> NoReturn:
    """Skips a test that cannot run on this machine. It does not count as passed."""
    pytest.skip(NOT_RUN + why)

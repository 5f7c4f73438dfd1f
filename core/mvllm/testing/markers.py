"""How a test of the suite says what it stands for.

@clause("ATT-02", needs="sliding_window")
def test_a_window_hides_what_lies_before_it(...): ...

@clause("ATT-08", refusal=True)              runs where soft_cap is *not* claimed: what is said to who asks for it?
def test_soft_cap_that_is_not_claimed_is_refused(...): ...
"""

from __future__ import annotations

from typing import NoReturn

import pytest

from mvllm.testing.clauses import CLAUSES

MARKER = "mvllm_clause"
EXHAUSTIVE_MARKER = "mvllm_exhaustive"

NOT_CLAIMED, NOT_APPLICABLE, NOT_RUN = "not claimed: ", "not applicable: ", "not run: "
"""How the reason of a skipped test begins."""

exhaustive = pytest.mark.mvllm_exhaustive
"""A case that a thinned-out run leaves out: another value of a grid that the remaining cases also walk."""


def clause(*ids: str, needs: str | None = None, refusal: bool = False) -> pytest.MarkDecorator:
    """Says which clauses a test stands for.

    Args:
        ids: Their ids.
        needs: A capability without which the test makes no sense, besides what the clauses themselves need.
        refusal: The test is about what happens without `needs` (or without what the clauses need).
    """
    unknown = [i for i in ids if i not in CLAUSES]
    if unknown or not ids:
        raise ValueError(f"There is no clause {unknown}.")
    return pytest.mark.mvllm_clause(*ids, needs=needs, refusal=refusal)


def skip_not_claimed(what: str) -> NoReturn:
    """Ends a test whose subject the platform does not offer."""
    pytest.skip(NOT_CLAIMED + what)


def skip_not_run(why: str) -> NoReturn:
    """Ends a test that this machine cannot carry out. Never counts as passed."""
    pytest.skip(NOT_RUN + why)

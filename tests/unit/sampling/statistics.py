"""Chi-square test of counts against a distribution."""

from __future__ import annotations

import numpy as np
from scipy import stats


def assert_drawn_from(counts: np.ndarray, probabilities: np.ndarray, *, level: float = 1e-4) -> None:
    """Asserts by a chi-square test that `counts` are plausible draws from `probabilities`.

    Cells that expect fewer than five draws are merged. Seeds are fixed, so a test that passes always passes.
    """
    assert counts[probabilities == 0].sum() == 0, "an impossible outcome was drawn"
    expected = probabilities * counts.sum()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    if len(expected) == 1:
        return
    expected *= observed.sum() / expected.sum()
    p_value = stats.chisquare(observed, expected).pvalue
    assert p_value > level, f"p = {p_value:.2g}; observed {observed[:20]}, expected {expected[:20]}"

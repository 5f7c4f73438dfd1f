"""Scores of pairs of prompts."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from mvllm.engine.frontend.scoring import similarity


def test_long_prompts_are_compared_in_little_memory() -> None:
    one, other = np.random.default_rng(0).standard_normal((2, 3000, 4), np.float32)
    expected = sum(float((other @ row).max()) for row in one)
    tracemalloc.start()
    try:
        found = similarity(one, other)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == pytest.approx(expected, rel=1e-5)
    assert peak < 0.5 * 4 * len(one) * len(other)

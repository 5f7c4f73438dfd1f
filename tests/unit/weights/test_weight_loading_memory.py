"""Loading needs the memory of the weights once."""

from __future__ import annotations

import pytest

from tests.perf.weight_loading_memory import ALLOWED_EXTRA, measure


@pytest.mark.serial
def test_loading_peaks_at_the_weights_and_a_little_more():
    small, large = measure(64), measure(256)
    assert large["peak"] - large["weights"] < ALLOWED_EXTRA
    # The additional memory does not grow with the weights.
    extra = (large["peak"] - large["weights"]) - (small["peak"] - small["weights"])
    assert extra < 64_000_000

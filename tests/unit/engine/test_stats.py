"""RateMeter: rates that are read while they change."""

from __future__ import annotations

from mvllm.engine.metrics.stats import RateMeter


def test_a_rate_is_computed_from_the_totals_of_a_counter() -> None:
    meter = RateMeter(clock=lambda: 5.0)
    for total in (3, 3, 2, 10):  # an older total may come after a newer one
        meter.update_total(total)
    assert meter.per_second() == 10.0


def test_a_rate_can_be_read_while_another_thread_counts() -> None:
    """Like another thread that runs between any two entries."""

    class Now(float):
        def __sub__(self, other: float) -> float:
            meter._counts[len(meter._counts)] = 5
            return float(self) - other

    meter = RateMeter(clock=lambda: Now(0.0))
    meter.add(1)
    assert meter.per_second() == 1.0

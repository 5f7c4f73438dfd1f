"""The table of tests/perf/busy_machine.py."""

from __future__ import annotations

from tests.perf.busy_machine import rows


def test_ratios_are_of_the_same_round_and_quotas_are_compared_with_one_thread():
    seconds = {"idle": [1.0, 2.0, 4.0], "one thread": [2.0, 3.0, 6.0], "quota 1": [2.2, 3.0, 12.0]}
    lines = list(rows("int8", "single", seconds, {"idle": True, "one thread": False, "quota 1": True}))
    assert lines == [
        "| int8 | single | idle | 2.000 | 1.00 | 1.00-1.00 |  | 3 |  |",
        "| int8 | single | one thread | 3.000 | 1.50 | 1.50-2.00 |  | 3 | beside other programs |",
        "| int8 | single | quota 1 | 3.000 | 2.20 | 1.50-3.00 | 1.10 | 3 |  |",
    ]

"""Detection of silent processes; the time in which the monitor itself is suspended does not count."""

from __future__ import annotations

from mvllm.entrypoints.openai.server.heartbeat_monitor import HeartbeatMonitor


def test_a_process_that_is_silent_for_longer_than_the_limit_is_found_and_the_others_are_not() -> None:
    heartbeats = HeartbeatMonitor(60.0, 2, 0.0)
    found = {second: heartbeats.find_silent([7.0, second], float(second)) for second in range(5, 80, 5)}
    assert found[5] == found[60] == [] and found[70] == [0] == found[75]


def test_time_in_which_the_monitor_itself_was_stopped_does_not_count() -> None:
    heartbeats = HeartbeatMonitor(60.0, 1, 0.0)
    heartbeats.find_silent([7.0], 1.0)
    assert heartbeats.find_silent([7.0], 3600.0) == []
    assert [heartbeats.find_silent([7.0], 3600.0 + 30.0 * look) for look in range(1, 9)] == [[]] * 8


def test_without_a_limit_no_process_is_found_and_no_checks_are_made() -> None:
    heartbeats = HeartbeatMonitor(0.0, 1, 0.0)
    assert heartbeats.poll_interval_ms is None
    assert heartbeats.find_silent([7.0], 1.0) == heartbeats.find_silent([7.0], 1e9) == []

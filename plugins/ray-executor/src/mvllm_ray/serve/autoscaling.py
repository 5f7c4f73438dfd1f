"""Number of replicas by the time that requests wait for their first step, as well as by ongoing requests."""

from __future__ import annotations

from typing import Any

MAX_GROWTH = 2.0
"""Factor by which one decision may grow the number of replicas."""


class QueueTime:
    """The time that requests wait for their first step, from a server's counters.

    Args:
        now: Seconds, monotonic.
    """

    def __init__(self, now: float) -> None:
        self._seconds, self._count = 0.0, 0.0
        self._scheduled_at = now  # of the last call that saw a newly scheduled request, or no waiting one
        self._last = 0.0

    def update(self, seconds: float, count: float, num_waiting: float, now: float) -> float:
        """The mean wait of the requests that were scheduled since the last call.

        If none was while some wait, all wait at least since then, and not less than those before: a queue that does not
        move is no short queue.

        Args:
            seconds, count: Sum of the waits and number of all requests that were scheduled so far.
            num_waiting: Requests that wait now.
            now: Seconds, monotonic.
        """
        new_seconds, new = seconds - self._seconds, count - self._count
        self._seconds, self._count = seconds, count
        if new > 0 or not num_waiting:
            self._scheduled_at = now
            self._last = new_seconds / new if new > 0 else 0.0
            return self._last
        return max(self._last, now - self._scheduled_at)


class QueueTimePolicy:
    """Serve's autoscaling policy. Ongoing requests give the number of replicas; a long queue time raises it.

    A replica that is busy with long prompts has few requests and a long queue. While requests wait for more than half
    of the target, no replica is removed.

    Args:
        target_queue_seconds: Mean seconds from the arrival of a request to its first step.
    """

    def __init__(self, target_queue_seconds: float) -> None:
        self._target = target_queue_seconds

    def __call__(self, ctx: Any) -> tuple[float, dict[str, Any]]:
        """The wanted number of replicas. Serve applies limits and delays.

        Args:
            ctx: Serve's AutoscalingContext.
        """
        current = ctx.current_num_replicas
        if current == 0:
            return ctx.target_num_replicas, {}
        wanted = ctx.total_num_requests / ctx.config.get_target_ongoing_requests()
        metrics = ctx.aggregated_metrics or {}
        waits = metrics.get("queue_seconds", {}).values()
        ratio = max(waits, default=0.0) / self._target
        if ratio > 1:
            wanted = max(wanted, current * min(ratio, MAX_GROWTH))
        elif ratio > 0.5:
            wanted = max(wanted, current)
        return wanted, {}

"""Number of replicas by the time that requests wait for their first step, as well as by ongoing requests."""

from __future__ import annotations

from typing import Any

MAX_GROWTH = 2.0
"""Factor by which one decision may grow the number of replicas."""


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

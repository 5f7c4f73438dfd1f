"""Counts answers and their times. Labels come from short lists of ours, so clients cannot make new series."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_LABELS = ("handler", "method", "status")


class HTTPMetrics:
    """The metrics of the HTTP side.

    Args:
        registry: Where they are gathered, together with the engine's.
        prefix: What their names begin with.
    """

    def __init__(self, registry: CollectorRegistry, prefix: str = "mvllm:") -> None:
        self._registry = registry
        self._requests = Counter(f"{prefix}http_requests", "Answers.", _LABELS, registry=registry)
        self._seconds = Histogram(
            f"{prefix}http_request_duration_seconds",
            "Seconds from the head of a request to the end of its answer.",
            _LABELS,
            registry=registry,
            buckets=_BUCKETS,
        )

    def observe(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Counts one answer."""
        labels = (handler, method, f"{status // 100}xx" if status else "left")
        self._requests.labels(*labels).inc()
        self._seconds.labels(*labels).observe(seconds)

    def text(self) -> bytes:
        """All metrics of the registry, as Prometheus reads them."""
        return generate_latest(self._registry)

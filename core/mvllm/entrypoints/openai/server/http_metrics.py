"""HTTP metrics: number and duration of responses. Labels have fixed values, so clients cannot create series."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from mvllm.engine.metrics.prometheus import cumulative_buckets
from mvllm.engine.metrics.stats import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_LABELS = ("handler", "method", "status")

Labels = tuple[str, str, str]
HTTPMetricsSnapshot = dict[Labels, tuple[list[int], float]]
"""By labels: the counts of a histogram of durations, and the sum of the durations in seconds."""


class HTTPMetrics(Collector):
    """Prometheus collector of the HTTP metrics of all processes of a server.

    Args:
        registry: Where it registers itself.
        prefix: Beginning of the metrics' names.
        other_servers: Returns the metrics of the server's other processes.
        on_change: Called after each response.

    Attributes:
        content_type: The Content-Type of `exposition`.
    """

    content_type = CONTENT_TYPE

    def __init__(
        self,
        registry: CollectorRegistry,
        prefix: str = "mvllm:",
        other_servers: Callable[[], Iterable[HTTPMetricsSnapshot]] = tuple,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._registry = registry
        self._prefix = prefix
        self._other_servers = other_servers
        self._on_change = on_change
        self._histograms: dict[Labels, Histogram] = {}
        registry.register(self)

    def observe(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Counts one response."""
        labels = (handler, method, f"{status // 100}xx" if status else "left")
        histogram = self._histograms.get(labels)
        if histogram is None:
            histogram = self._histograms[labels] = Histogram(_BUCKETS)
        histogram.observe(seconds)
        self._on_change()

    def snapshot(self) -> HTTPMetricsSnapshot:
        """The metrics of this process."""
        return {labels: (list(each.counts), each.sum) for labels, each in list(self._histograms.items())}

    def exposition(self) -> bytes:
        """All metrics of the registry, in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The metrics of all processes together."""
        answers = CounterMetricFamily(f"{self._prefix}http_requests", "Answers.", labels=_LABELS)
        seconds = HistogramMetricFamily(
            f"{self._prefix}http_request_duration_seconds",
            "Seconds from the head of a request to the end of its answer.",
            labels=_LABELS,
        )
        for labels, histogram in sorted(self._total().items()):
            answers.add_metric(labels, sum(histogram.counts))
            seconds.add_metric(labels, cumulative_buckets(histogram), histogram.sum)
        yield answers
        yield seconds

    def _total(self) -> dict[Labels, Histogram]:
        total: dict[Labels, Histogram] = {}
        for metrics in (self.snapshot(), *self._other_servers()):
            for labels, (counts, sum_) in metrics.items():
                histogram = total.setdefault(labels, Histogram(_BUCKETS))
                histogram.counts = [a + b for a, b in zip(histogram.counts, counts)]
                histogram.sum += sum_
        return total

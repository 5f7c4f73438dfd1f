"""Counts answers and their times. Labels come from short lists of ours, so clients cannot make new series."""

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
"""Answers by how long they took, and the sum of that, by labels."""


class HTTPMetrics(Collector):
    """The metrics of the HTTP side.

    Args:
        registry: Where they are gathered, together with the engine's.
        prefix: What their names begin with.
        elsewhere: Gives the figures of the other processes of this server.
        changed: Called after each answer.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        prefix: str = "mvllm:",
        elsewhere: Callable[[], Iterable[HTTPMetricsSnapshot]] = tuple,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._registry = registry
        self._prefix = prefix
        self._other_servers = elsewhere
        self._on_change = changed
        self._histograms: dict[Labels, Histogram] = {}
        registry.register(self)

    def observe(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Counts one answer."""
        labels = (handler, method, f"{status // 100}xx" if status else "left")
        histogram = self._histograms.get(labels)
        if histogram is None:
            histogram = self._histograms[labels] = Histogram(_BUCKETS)
        histogram.observe(seconds)
        self._on_change()

    def snapshot(self) -> HTTPMetricsSnapshot:
        """Everything counted here."""
        return {labels: (list(each.counts), each.sum) for labels, each in list(self._histograms.items())}

    def exposition(self) -> bytes:
        """All metrics of the registry, as Prometheus reads them."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Those of all processes together."""
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
        for figures in (self.snapshot(), *self._other_servers()):
            for labels, (counts, sum_) in figures.items():
                histogram = total.setdefault(labels, Histogram(_BUCKETS))
                histogram.counts = [a + b for a, b in zip(histogram.counts, counts)]
                histogram.sum += sum_
        return total

"""Metrics of a router's models: loads, unloads, and the state of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from mvllm.extension_api.server import Histogram, cumulative_buckets

_LOAD_BUCKETS = (0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class MeasuredModel(Protocol):
    """What a model of the pool tells about itself."""

    @property
    def is_loaded(self) -> bool: ...
    @property
    def num_in_flight(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...


class PoolMetrics:
    """Counts loads and unloads, by the model's name."""

    def __init__(self) -> None:
        self.load_seconds: dict[str, Histogram] = {}
        self.failed_loads: Counter[str] = Counter()
        self.unloads: Counter[tuple[str, str]] = Counter()

    def count_load(self, name: str, seconds: float, *, failed: bool) -> None:
        """Counts a load that has ended."""
        if failed:
            self.failed_loads[name] += 1
        else:
            self.load_seconds.setdefault(name, Histogram(_LOAD_BUCKETS)).observe(seconds)

    def count_unload(self, name: str, reason: str) -> None:
        """Counts a model that has been unloaded, or whose server has died."""
        self.unloads[name, reason] += 1


class PoolCollector(Collector):
    """Prometheus collector of the pool.

    Args:
        models: Returns the names and models.
        metrics: The counts.
        prefix: Beginning of the metrics' names.
    """

    def __init__(
        self,
        models: Callable[[], Iterable[tuple[str, MeasuredModel]]],
        metrics: PoolMetrics,
        prefix: str = "mvllm:",
    ) -> None:
        self._models = models
        self._metrics = metrics
        self._prefix = prefix

    def describe(self) -> Iterator[Metric]:
        """Nothing: the registry then does not collect when it registers."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        prefix, labels = self._prefix, ("model_name",)
        loaded = GaugeMetricFamily(f"{prefix}model_loaded", "Whether the model is loaded.", labels=labels)
        running = GaugeMetricFamily(f"{prefix}model_requests_in_flight", "Requests at its server.", labels=labels)
        waiting = GaugeMetricFamily(f"{prefix}model_requests_waiting", "Requests that wait for it.", labels=labels)
        for name, model in self._models():
            loaded.add_metric((name,), float(model.is_loaded))
            running.add_metric((name,), model.num_in_flight)
            waiting.add_metric((name,), model.num_waiting)
        yield from (loaded, running, waiting)
        seconds = HistogramMetricFamily(f"{prefix}model_load_seconds", "Seconds of a load.", labels=labels)
        for name, histogram in sorted(self._metrics.load_seconds.items()):
            seconds.add_metric((name,), cumulative_buckets(histogram), histogram.sum)
        failed = CounterMetricFamily(f"{prefix}model_load_failures", "Loads that failed.", labels=labels)
        for name, count in sorted(self._metrics.failed_loads.items()):
            failed.add_metric((name,), count)
        unloads = CounterMetricFamily(
            f"{prefix}model_unloads",
            "Models unloaded, by reason: room or memory for another, idle, request, death of its server.",
            labels=("model_name", "reason"),
        )
        for (name, reason), count in sorted(self._metrics.unloads.items()):
            unloads.add_metric((name, reason), count)
        yield from (seconds, failed, unloads)

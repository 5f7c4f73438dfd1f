"""The metrics of an engine as Python objects, for `LLM.get_metrics`. Names and values are those of `/metrics`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from mvllm.engine.metrics.prometheus import EngineCollector, MeasuredEngine


@dataclass
class Metric:
    """One metric.

    Attributes:
        name: Its name, `mvllm:` and what it measures.
        labels: Label values by name.
    """

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A count that only rises.

    Attributes:
        value: The count since the start.
    """

    value: int = 0


@dataclass
class Gauge(Metric):
    """A value that rises and falls.

    Attributes:
        value: The present value.
    """

    value: float = 0.0


@dataclass
class Vector(Metric):
    """A list of counts, one per position.

    Attributes:
        values: The counts since the start.
    """

    values: list[int] = field(default_factory=list)


@dataclass
class Histogram(Metric):
    """A distribution.

    Attributes:
        count, sum: Number and sum of the values.
        buckets: Number of values up to each bound; the bounds are texts, the last one `+Inf`.
    """

    count: int = 0
    sum: float = 0.0
    buckets: dict[str, int] = field(default_factory=dict)


def read_metrics(engine: MeasuredEngine) -> list[Metric]:
    """All metrics of an engine, in the order of `/metrics`."""
    return list(_read(engine))


def _read(engine: MeasuredEngine) -> Iterator[Metric]:
    for family in EngineCollector(engine).collect():
        by_labels: dict[tuple[tuple[str, str], ...], Histogram] = {}
        vectors: dict[tuple[tuple[str, str], ...], Vector] = {}
        for sample in family.samples:
            labels = dict(sample.labels)
            if family.type == "histogram":
                bound = labels.pop("le", None)
                found = by_labels.setdefault(tuple(labels.items()), Histogram(family.name, labels))
                if sample.name.endswith("_bucket"):
                    found.buckets[str(bound)] = int(sample.value)
                elif sample.name.endswith("_sum"):
                    found.sum = sample.value
                else:
                    found.count = int(sample.value)
            elif labels.pop("position", None) is not None:
                vectors.setdefault(tuple(labels.items()), Vector(family.name, labels)).values.append(int(sample.value))
            elif family.type == "counter":
                yield Counter(family.name, labels, int(sample.value))
            else:
                yield Gauge(family.name, labels, sample.value)
        yield from by_labels.values()
        yield from vectors.values()

"""docs/reference/metrics.md: every metric of `GET /metrics` with its type, labels and meaning.

python -m tests.unit.docs.metrics_page    writes the page from the collectors
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from mvllm.engine.metrics.prometheus import EngineCollector
from mvllm.engine.metrics.stats import EngineMetrics
from mvllm.entrypoints.openai.server.http_metrics import HTTPMetrics
from mvllm.messages.requests import SchedulerStats

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"
HEAD = """\
# Metrics

`GET /metrics` of `mvllm serve` answers in the text format of Prometheus. All names begin with
`mvllm:`; `--metrics-alias-prefix PREFIX` repeats the engine's metrics under a second prefix.
[grafana-dashboard.json](../grafana-dashboard.json) is a Grafana dashboard of them.

Generated from the collectors: `python -m tests.unit.docs.metrics_page`. A histogram has the samples
`_bucket`, `_sum` and `_count`. Besides these, the answer has the `process_` metrics of the
Prometheus client.

| metric | type | labels | meaning |
| --- | --- | --- | --- |
"""


class ZeroMetrics(SimpleNamespace):
    """Metrics of an engine that has done nothing: every requested value is 0."""

    def __getattr__(self, name: str) -> Any:
        return 0


def families() -> Iterator[tuple[Metric, tuple[str, ...]]]:
    """Every metric with the names of its labels."""
    engine = ZeroMetrics(
        all_metrics=EngineMetrics(1024),
        stats=SchedulerStats(),
        load=ZeroMetrics(),
        cache_summary=ZeroMetrics(),
        config=ZeroMetrics(cache=ZeroMetrics(), scheduler=ZeroMetrics(), speculative=None),
    )
    for family in EngineCollector(cast(Any, engine), model_name="model").collect():
        yield family, tuple(getattr(family, "_labelnames", ()))
    for family in HTTPMetrics(CollectorRegistry()).collect():
        yield family, tuple(getattr(family, "_labelnames", ()))


def row(family: Metric, labels: Sequence[str]) -> str:
    """One metric as a row of the page."""
    name = family.name + ("_total" if family.type == "counter" else "")
    shown = ", ".join(f"`{label}`" for label in labels)
    return f"| `{name}` | {family.type} | {shown} | {family.documentation} |\n"


def page() -> str:
    """The complete page. Sections about other packages stay as they are: those write them."""
    _, heading, others = PAGE.read_text(encoding="utf-8").partition("\n## ")
    return HEAD + "".join(row(*each) for each in families()) + heading + others


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

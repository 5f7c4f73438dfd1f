"""The Grafana dashboard uses all metrics of a running server, with their correct names and labels."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana-dashboard.json"
SCRAPED = {"job", "instance"}  # labels that Prometheus adds
NAME = re.compile(r"\b(?:mvllm:|process_)\w+")
SELECTOR = re.compile(r"((?:mvllm:|process_)\w+)(?:\{([^}]*)\})?")
GROUPED = re.compile(r"\bby \(([^)]*)\)")
IN_LEGEND = re.compile(r"\{\{(\w+)\}\}")


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def samples(client: httpx2.Client) -> dict[str, set[str]]:
    """Sample names on /metrics, each with its labels."""
    for stream in (False, True):
        ask = {"prompt": "Once upon a time", "max_tokens": 4, "n": 2, "stream": stream}
        assert client.post("/v1/completions", json=ask).status_code == 200
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def queries(dashboard: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Title, expression and legend of each query."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"], target.get("legendFormat", "")
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"], ""


def test_every_metric_of_the_dashboard_exists_on_a_running_server(
    dashboard: dict[str, Any], samples: dict[str, set[str]]
) -> None:
    asked = {name for _, expression, _ in queries(dashboard) for name in NAME.findall(expression)}
    assert asked and asked <= samples.keys(), asked - samples.keys()


def test_every_label_of_the_dashboard_exists(dashboard: dict[str, Any], samples: dict[str, set[str]]) -> None:
    for title, expression, legend in queries(dashboard):
        if expression.startswith("label_values("):
            metric, label = re.fullmatch(r"label_values\(([\w:]+)[^,]*, (\w+)\)", expression).groups()  # type: ignore
            assert label in samples[metric] | SCRAPED, title
            continue
        known = set.intersection(*(samples[name] for name in NAME.findall(expression))) | SCRAPED
        for name, selector in SELECTOR.findall(expression):
            labels = re.findall(r"(\w+)=", selector)
            assert labels and set(labels) <= samples[name] | SCRAPED, (title, name, labels)
        grouped = {label.strip() for group in GROUPED.findall(expression) for label in group.split(",")}
        assert grouped <= known, (title, grouped - known)
        assert set(IN_LEGEND.findall(legend)) <= (grouped or known), (title, legend)


def test_rates_use_counters_and_quantiles_use_buckets(dashboard: dict[str, Any]) -> None:
    for title, expression, _ in queries(dashboard):
        for function, name in re.findall(r"\b(rate|increase)\(((?:mvllm:|process_)\w+)\{", expression):
            assert name.endswith(("_total", "_bucket", "_sum", "_count")), (title, function, name)
        quantiles = re.findall(r"histogram_quantile\(([\d.]+), sum by \((\w+)[^)]*\) \(rate\((mvllm:\w+)", expression)
        assert len(quantiles) == expression.count("histogram_quantile("), title
        for quantile, first, name in quantiles:
            assert 0 < float(quantile) < 1 and first == "le" and name.endswith("_bucket"), title
        assert expression.count("(") == expression.count(")") and expression.count("{") == expression.count("}"), title


def test_every_metric_of_the_engine_is_shown(dashboard: dict[str, Any], samples: dict[str, set[str]]) -> None:
    asked = {name for _, expression, _ in queries(dashboard) for name in NAME.findall(expression)}

    def is_shown(name: str) -> bool:
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        return bool({name, base, f"{base}_bucket", f"{base}_sum"} & asked)

    engine = {name for name in samples if name.startswith("mvllm:") and not name.endswith("_created")}
    assert {name for name in engine if not is_shown(name)} == set()


def test_panels_have_unique_ids_and_do_not_overlap(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 20
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
        for target in panel.get("targets", ()):
            assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}

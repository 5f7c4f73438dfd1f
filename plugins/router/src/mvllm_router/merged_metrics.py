"""Metrics of several model servers as one page in Prometheus' text format.

The format has all samples of a metric together, after its HELP and TYPE. So the pages are taken apart by metric,
samples without the label `model_name` get it, and each metric is written once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S.*)", re.ASCII)
_LABEL = "model_name"
_OF_HTTP = "http_request"
"""Part of the names of metrics that the router counts itself, for the same requests."""


def merge_metrics(own: str, pages: Iterable[tuple[str, str]]) -> str:
    """One page with the metrics of all.

    Args:
        own: The router's page; its samples are not changed.
        pages: Names of models, and the pages of their servers.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    _read(own, None, heads, samples)
    for name, page in pages:
        _read(page, name, heads, samples)
    lines = [line for metric, found in samples.items() if found for line in (*heads[metric], *found)]
    return "\n".join([*lines, ""])


def _read(page: str, model: str | None, heads: dict[str, list[str]], samples: dict[str, list[str]]) -> None:
    metric = ""
    label = "" if model is None else f'{_LABEL}="{_escape(model)}"'
    for line in page.splitlines():
        if line.startswith("# HELP "):
            metric = line.split(" ", 3)[2]
            if metric not in heads:
                heads[metric], samples[metric] = [line], []
        elif line.startswith("# TYPE "):
            if len(heads.get(metric, ())) == 1:
                heads[metric].append(line)
        elif metric and line and not line.startswith("#") and not (model is not None and _OF_HTTP in metric):
            samples[metric].append(_with_label(line, label))


def _with_label(line: str, label: str) -> str:
    if not label or f'{_LABEL}="' in line or (match := _SAMPLE.fullmatch(line)) is None:
        return line
    name, labels, value = match.groups()
    return f"{name}{{{labels + ',' if labels else ''}{label}}} {value}"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")

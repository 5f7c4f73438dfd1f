"""Tables and JSON files with benchmark results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mvllm.extension_api import ConfigError
from mvllm_bench.metrics import METRICS, interpolated_percentile, percentile_key

PERCENTILES = (10, 25, 50, 75, 90, 99)
_WIDTH = 60


def format_serving_table(result: Mapping[str, Any], percentiles: Sequence[float], selected: Sequence[str]) -> str:
    """The result of a serving benchmark as a text table."""
    rows: list[tuple[str, object]] = [
        ("Successful requests", result["completed"]),
        ("Failed requests", result["failed"]),
        ("Benchmark duration (s)", result["duration"]),
        ("Total input tokens", result["total_input_tokens"]),
        ("Total generated tokens", result["total_output_tokens"]),
        ("Request throughput (req/s)", result["request_throughput"]),
    ]
    if result["request_goodput"] is not None:
        rows.append(("Request goodput (req/s)", result["request_goodput"]))
    rows += [
        ("Output token throughput (tok/s)", result["output_throughput"]),
        ("Peak output token throughput (tok/s)", result["max_output_tokens_per_s"]),
        ("Peak concurrent requests", result["max_concurrent_requests"]),
        ("Total token throughput (tok/s)", result["total_token_throughput"]),
    ]
    lines = [_title("Serving benchmark", "="), *_rows(rows)]
    for name, title in METRICS.items():
        if name not in selected:
            continue
        keys = ["mean", "median", "std", *(percentile_key(p) for p in percentiles)]
        lines.append(_title(title, "-"))
        lines += _rows((f"{_capitalize(key)} {name.upper()} (ms)", result[f"{key}_{name}_ms"]) for key in keys)
    return "\n".join([*lines, "=" * _WIDTH])


def format_table(title: str, rows: Iterable[tuple[str, object]]) -> str:
    """Names and values as a text table."""
    return "\n".join([_title(title, "="), *_rows(rows), "=" * _WIDTH])


def standard_percentiles(values: Sequence[float]) -> dict[str, float]:
    """Values at PERCENTILES, by percentile."""
    return {str(p): interpolated_percentile(values, p) for p in PERCENTILES}


def write_json(path: Path, result: Mapping[str, Any], *, append: bool = False) -> None:
    """Writes a result to a file as one line of JSON; with `append`, adds the line.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
    except OSError as e:
        raise ConfigError(f"The result cannot be written to {path}: {e.strerror}.") from e


def _title(text: str, line: str) -> str:
    return f" {text} ".center(_WIDTH, line)


def _rows(rows: Iterable[tuple[str, object]]) -> list[str]:
    return [f"{name + ':':<{_WIDTH - 15}}{_format_value(value):>15}" for name, value in rows]


def _format_value(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]

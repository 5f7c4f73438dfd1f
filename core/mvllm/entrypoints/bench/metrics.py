"""The figures of a benchmark against a server, made of what its client saw.

sent                first text             text   text             last chunk
 │─────── TTFT ─────────│───── ITL ──────────│─ITL──│────── ... ──────│
 │───────────────────────────── E2EL ────────────────────────────────│
                        │── TPOT = this / (output tokens - 1) ───────│
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
"""Short name to name."""

GOODPUT_METRICS = ("ttft", "tpot", "e2el")


@dataclass(slots=True)
class RequestResult:
    """What was seen of one request.

    Attributes:
        start: When it was sent, in seconds of the monotonic clock.
        ttft: Seconds until the first text came.
        latency: Seconds until the last chunk with a choice came.
        itl: Seconds between one text and the next.
        prompt_tokens, output_tokens: As the server counts them, or None where it did not say.
        text: What came.
        error: Why it failed; None where it did not.
    """

    start: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    itl: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    text: str = ""
    error: str | None = None

    @property
    def success(self) -> bool:
        return self.error is None

    @property
    def num_prompt_tokens(self) -> int:
        return self.prompt_tokens or 0

    @property
    def num_output_tokens(self) -> int:
        return self.output_tokens or 0 if self.success else 0

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first; 0 where there was no second."""
        return (self.latency - self.ttft) / (self.num_output_tokens - 1) if self.num_output_tokens > 1 else 0.0


def calculate_metrics(
    traces: Sequence[RequestResult],
    duration: float,
    *,
    percentiles: Sequence[float] = (99,),
    selected: Sequence[str] = tuple(METRICS),
    goodput: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The figures under the field's usual keys.

    Args:
        traces: One per request.
        duration: Seconds from the start to the last answer.
        percentiles: Which, from 0 to 100.
        selected: Of which metrics, by short name.
        goodput: Most milliseconds that a good request takes, by the short name of the metric.
    """
    done = [trace for trace in traces if trace.success]
    num_output = sum(trace.num_output_tokens for trace in done)
    num_input = sum(trace.num_prompt_tokens for trace in done)
    duration = max(duration, 1e-9)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(traces) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration,
        "request_goodput": None if goodput is None else sum(_is_good(t, goodput) for t in done) / duration,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
        "max_output_tokens_per_s": _peak_token_throughput(done),
        "max_concurrent_requests": _peak_concurrency(traces),
    }
    values = {
        "ttft": [t.ttft for t in done],
        "tpot": [t.tpot for t in done if t.num_output_tokens > 1],
        "itl": [gap for t in done for gap in t.itl],
        "e2el": [t.latency for t in done],
    }
    for name in METRICS:
        if name in selected:
            result |= _statistics(name, values[name], percentiles)
    return result


def per_request_details(traces: Sequence[RequestResult]) -> dict[str, Any]:
    """What was seen of each request, under the field's usual keys."""
    return {
        "input_lens": [trace.num_prompt_tokens for trace in traces],
        "output_lens": [trace.num_output_tokens for trace in traces],
        "start_times": [trace.start for trace in traces],
        "ttfts": [trace.ttft for trace in traces],
        "itls": [trace.itl for trace in traces],
        "generated_texts": [trace.text for trace in traces],
        "errors": [trace.error or "" for trace in traces],
    }


def percentile_key(percentile: float) -> str:
    """`p99`, `p99.9`."""
    return f"p{percentile:g}"


def interpolated_percentile(values: Sequence[float], percentile: float) -> float:
    """Between the two nearest values, in proportion; 0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percentile / 100
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _statistics(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Mean, median, standard deviation and percentiles in milliseconds; zeros where there is nothing."""
    values = [1000 * value for value in seconds]
    mean = math.fsum(values) / len(values) if values else 0.0
    variance = math.fsum((value - mean) ** 2 for value in values) / len(values) if values else 0.0
    ordered = sorted(values)
    figures = {
        f"mean_{name}_ms": mean,
        f"median_{name}_ms": interpolated_percentile(ordered, 50),
        f"std_{name}_ms": math.sqrt(variance),
    }
    return figures | {f"{percentile_key(p)}_{name}_ms": interpolated_percentile(ordered, p) for p in percentiles}


def _is_good(trace: RequestResult, limits: Mapping[str, float]) -> bool:
    found = {"ttft": trace.ttft, "tpot": trace.tpot, "e2el": trace.latency}
    return all(1000 * found[name] <= limit for name, limit in limits.items())


def _peak_token_throughput(done: Sequence[RequestResult]) -> float:
    """Most tokens that came within one second of the run. A text with several tokens in it counts as so many."""
    counts: dict[int, float] = {}
    begin = min((trace.start for trace in done), default=0.0)
    for trace in done:
        per_text = trace.num_output_tokens / (len(trace.itl) + 1)
        moment = trace.start + trace.ttft - begin
        for gap in (0.0, *trace.itl):
            moment += gap
            counts[int(moment)] = counts.get(int(moment), 0.0) + per_text
    return max(counts.values(), default=0.0)


def _peak_concurrency(traces: Sequence[RequestResult]) -> int:
    """Most requests under way at once. One that ends as another begins is not beside it."""
    events = sorted(event for t in traces if t.latency > 0 for event in ((t.start, 1), (t.start + t.latency, -1)))
    peak = current = 0
    for _, change in events:
        current += change
        peak = max(peak, current)
    return peak

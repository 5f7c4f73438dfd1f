"""Metrics of a serving benchmark, computed from the client's timings.

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
"""Short names and titles of the latency metrics."""

GOODPUT_METRICS = ("ttft", "tpot", "e2el")


@dataclass(slots=True)
class RequestResult:
    """Timings and result of one request.

    Attributes:
        start: Time of sending, of time.perf_counter.
        ttft: Seconds until the first chunk with text.
        latency: Seconds until the last chunk with a choice.
        itl: Seconds between consecutive chunks with text.
        prompt_tokens, output_tokens: The server's counts; None if it sent none.
        text: The generated text.
        error: Why the request failed; None for success.
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
        """Seconds per output token after the first; 0 with fewer than two tokens."""
        return (self.latency - self.ttft) / (self.num_output_tokens - 1) if self.num_output_tokens > 1 else 0.0


def calculate_metrics(
    requests: Sequence[RequestResult],
    duration: float,
    *,
    percentiles: Sequence[float] = (99,),
    selected: Sequence[str] = tuple(METRICS),
    goodput: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The metrics of a run, under the keys of common serving benchmarks.

    Args:
        requests: The results of all requests.
        duration: Seconds from the start to the last response.
        percentiles: Percentiles to compute, from 0 to 100.
        selected: Short names of the latency metrics to include.
        goodput: Limits in milliseconds by metric; a request that keeps all of them counts for goodput.
    """
    done = [request for request in requests if request.success]
    num_output = sum(request.num_output_tokens for request in done)
    num_input = sum(request.num_prompt_tokens for request in done)
    duration = max(duration, 1e-9)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(requests) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration,
        "request_goodput": None if goodput is None else sum(meets_limits(t, goodput) for t in done) / duration,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
        "max_output_tokens_per_s": _peak_token_throughput(done),
        "max_concurrent_requests": _peak_concurrency(requests),
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


def per_request_details(requests: Sequence[RequestResult]) -> dict[str, Any]:
    """Lists with one entry per request, under the keys of common serving benchmarks."""
    return {
        "input_lens": [request.num_prompt_tokens for request in requests],
        "output_lens": [request.num_output_tokens for request in requests],
        "start_times": [request.start for request in requests],
        "ttfts": [request.ttft for request in requests],
        "itls": [request.itl for request in requests],
        "generated_texts": [request.text for request in requests],
        "errors": [request.error or "" for request in requests],
    }


def percentile_key(percentile: float) -> str:
    """Name of a percentile in keys: `p99`, `p99.9`."""
    return f"p{percentile:g}"


def interpolated_percentile(values: Sequence[float], percentile: float) -> float:
    """A percentile with linear interpolation; 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    position = (len(ordered) - 1) * percentile / 100
    low, high = math.floor(position), math.ceil(position)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _statistics(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Mean, median, standard deviation and percentiles in milliseconds; zeros for no values."""
    values = [1000 * value for value in seconds]
    mean = math.fsum(values) / len(values) if values else 0.0
    variance = math.fsum((value - mean) ** 2 for value in values) / len(values) if values else 0.0
    ordered = sorted(values)
    statistics = {
        f"mean_{name}_ms": mean,
        f"median_{name}_ms": interpolated_percentile(ordered, 50),
        f"std_{name}_ms": math.sqrt(variance),
    }
    return statistics | {f"{percentile_key(p)}_{name}_ms": interpolated_percentile(ordered, p) for p in percentiles}


def meets_limits(request: RequestResult, limits: Mapping[str, float]) -> bool:
    """Whether a request keeps every limit, in milliseconds by metric."""
    found = {"ttft": request.ttft, "tpot": request.tpot, "e2el": request.latency}
    return all(1000 * found[name] <= limit for name, limit in limits.items())


def _peak_token_throughput(done: Sequence[RequestResult]) -> float:
    """The largest number of tokens in one second of the run. A chunk counts as its request's mean number."""
    counts: dict[int, float] = {}
    begin = min((request.start for request in done), default=0.0)
    for request in done:
        per_text = request.num_output_tokens / (len(request.itl) + 1)
        moment = request.start + request.ttft - begin
        for gap in (0.0, *request.itl):
            moment += gap
            counts[int(moment)] = counts.get(int(moment), 0.0) + per_text
    return max(counts.values(), default=0.0)


def _peak_concurrency(requests: Sequence[RequestResult]) -> int:
    """The largest number of concurrent requests. A request that ends when another starts does not overlap it."""
    events = sorted(event for t in requests if t.latency > 0 for event in ((t.start, 1), (t.start + t.latency, -1)))
    peak = current = 0
    for _, change in events:
        current += change
        peak = max(peak, current)
    return peak

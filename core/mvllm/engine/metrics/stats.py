"""Metrics of an engine's front end: counters and histograms as plain numbers.

Exporters such as `mvllm.engine.metrics.prometheus` read them on demand, so that no step calls a client library. Times
are measured in the front end, as callers see them, except for scheduling times, which the engine core sends. Both use
the monotonic clock of the machine.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import msgspec

from mvllm.engine.frontend.output_processor import OutputProcessorOutput
from mvllm.engine.frontend.request_state import RequestState
from mvllm.messages.requests import KVTierStats, SchedulerStats

_WINDOW_SECONDS = 10

TIME_TO_FIRST_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
                       10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
TOKEN_SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
                  5.0, 7.5, 10.0, 20.0, 40.0, 80.0)  # fmt: skip
REQUEST_SECONDS_BUCKETS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
                60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
STEP_TOKENS_BUCKETS = tuple(float(1 << i) for i in range(15))
NUM_SEQUENCES_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)


PRIORITY_CLASSES = ("high", "normal", "low")
"""Of requests with a priority below 0, of 0 and above 0."""


@dataclass(frozen=True)
class EngineLoad:
    """The load of an engine, as last reported by the engine core.

    Attributes:
        num_requests: Unfinished requests of this front end.
        num_running, num_waiting: Sequences in the scheduler.
        kv_cache_usage: Fraction of the KV cache in use, 0 to 1; the mean over all replicas.
        prompt_tokens_per_second, generation_tokens_per_second: Means over the last ten seconds.
        heartbeat_age: See `AsyncLLM.heartbeat_age`.
    """

    num_requests: int
    num_running: int
    num_waiting: int
    kv_cache_usage: float
    prompt_tokens_per_second: float
    generation_tokens_per_second: float
    heartbeat_age: float


class Histogram:
    """A histogram with fixed buckets.

    Args:
        bounds: Upper bounds (inclusive) of the buckets, rising.

    Attributes:
        counts: Number of values per bucket, and last of those above all bounds. Not cumulative.
        sum: Sum of all values.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Adds a value, `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class RateMeter:
    """A rate over the last ten seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: dict[int, int] = {}
        self._since = clock()
        self._total = 0

    def add(self, count: int) -> None:
        """Adds `count` at the current time."""
        second = int(self._clock())
        counts = self._counts
        if second in counts:
            counts[second] += count
            return
        counts[second] = count
        for old in [each for each in counts if each <= second - _WINDOW_SECONDS]:
            del counts[old]

    def update_total(self, total: int) -> None:
        """Adds the increase of a counter since the last call. The counter starts at 0."""
        if total > self._total:
            self.add(total - self._total)
            self._total = total

    def per_second(self) -> float:
        """The mean rate over the last ten seconds."""
        now = self._clock()
        recent = sum(count for second, count in list(self._counts.items()) if second > now - _WINDOW_SECONDS)
        return recent / min(float(_WINDOW_SECONDS), max(1.0, now - self._since))


class EngineMetricsSnapshot(msgspec.Struct, array_like=True):
    """The values of an EngineMetrics, as a message to the other front ends of the same engine.

    Attributes:
        counters: By name.
        finished: Finished sequences by finish reason.
        histograms: Counts and sum, by name.
    """

    counters: dict[str, int] = {}
    finished: dict[str, int] = {}
    histograms: dict[str, tuple[list[int], float]] = {}


class EngineMetrics:
    """The metrics of one front end, counted since its start.

    Args:
        max_model_len: Longest sequence in tokens: the highest bucket of the histograms of lengths.

    Attributes:
        finished: Finished sequences by finish reason.
        refused: Requests rejected because too many were waiting.
        mm_cache_queries, mm_cache_hits: Images, audio and videos of prompts, and those found processed.
        mm_processing_time: Seconds to fetch, decode and process one that was not found.
        mm_inflight_bytes: Bytes of those of unfinished prompts.
        by_priority: The latencies of requests whose priority is not 0, by `time_to_first_token/high` and so on; they
            are in the histograms of all requests, too.
    """

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        lengths = _one_two_five_bounds(max_model_len)
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter()
        self.refused = 0
        self.mm_cache_queries = 0
        self.mm_cache_hits = 0
        self.mm_inflight_bytes = 0
        self.mm_processing_time = Histogram(REQUEST_SECONDS_BUCKETS)
        self._item_lock = threading.Lock()
        self.time_to_first_token = Histogram(TIME_TO_FIRST_TOKEN_BUCKETS)
        self.inter_token_latency = Histogram(TOKEN_SECONDS_BUCKETS)
        self.time_per_output_token = Histogram(TOKEN_SECONDS_BUCKETS)
        self.e2e_latency = Histogram(REQUEST_SECONDS_BUCKETS)
        self.queue_time = Histogram(REQUEST_SECONDS_BUCKETS)
        self.prefill_time = Histogram(REQUEST_SECONDS_BUCKETS)
        self.decode_time = Histogram(REQUEST_SECONDS_BUCKETS)
        self.inference_time = Histogram(REQUEST_SECONDS_BUCKETS)
        self.request_prompt_tokens = Histogram(lengths)
        self.request_generation_tokens = Histogram(lengths)
        self.max_num_generation_tokens = Histogram(lengths)
        self.params_max_tokens = Histogram(lengths)
        self.params_n = Histogram(NUM_SEQUENCES_BUCKETS)
        self.iteration_tokens = Histogram(STEP_TOKENS_BUCKETS)
        self.by_priority: dict[str, Histogram] = {}

    def record(self, step: OutputProcessorOutput) -> None:
        """Records the outputs of one step."""
        num_prompt = 0
        for request in step.started:
            num_prompt += self._observe_first_token(request)
        if step.num_new_tokens:
            self.generation_tokens += step.num_new_tokens
            self.iteration_tokens.observe(num_prompt + step.num_new_tokens)
        for gap, count in step.inter_token_gaps.items():
            self.inter_token_latency.observe(gap, count)
        for (priority_class, gap), count in step.gaps_by_priority.items():
            self._of_class("inter_token_latency", priority_class).observe(gap, count)
        for request in step.finished:
            self.finish(request)

    def finish(self, request: RequestState) -> None:
        """Records a request that has finished or was aborted."""
        self.finished.update(sequence.finish_reason or "abort" for sequence in request.sequences)
        if request.is_pooling:
            self._finish_pooling(request)
            return
        num_generated = request.num_generated_tokens
        self.request_prompt_tokens.observe(request.num_prompt_tokens)
        self.request_generation_tokens.observe(num_generated)
        self.max_num_generation_tokens.observe(max(len(sequence.token_ids) for sequence in request.sequences))
        self.params_n.observe(request.params.n)
        self.params_max_tokens.observe(request.params.max_tokens or 0)
        self._observe_latencies(request, num_generated)

    def _finish_pooling(self, request: RequestState) -> None:
        """Records a pooling request, which generates no tokens."""
        metrics = request.metrics
        self.request_prompt_tokens.observe(request.num_prompt_tokens)
        if metrics.finished_time is None or metrics.first_scheduled_time is None:
            return
        self.prompt_tokens += request.num_prompt_tokens
        self.cached_prompt_tokens += request.num_cached_tokens
        self.e2e_latency.observe(metrics.finished_time - metrics.arrival_time)
        if request.priority_class is not None:
            histogram = self._of_class("e2e_latency", request.priority_class)
            histogram.observe(metrics.finished_time - metrics.arrival_time)
        self.queue_time.observe(metrics.first_scheduled_time - metrics.arrival_time)
        self.inference_time.observe(metrics.finished_time - metrics.first_scheduled_time)

    def observe_item(self, is_cached: bool, seconds: float) -> None:
        """Records one image, audio or video that was prepared. Callable in any thread.

        Args:
            is_cached: It was found processed.
            seconds: Time to fetch, decode and process it.
        """
        with self._item_lock:
            self.mm_cache_queries += 1
            if is_cached:
                self.mm_cache_hits += 1
            else:
                self.mm_processing_time.observe(seconds)

    def observe_item_memory(self, num_bytes: int) -> None:
        """Sets `mm_inflight_bytes`. Callable in any thread."""
        self.mm_inflight_bytes = num_bytes

    def latency_of_class(self, name: str, priority_class: str) -> Histogram:
        """A latency of the requests of a priority class, by the name of its attribute."""
        every: Histogram = getattr(self, name)
        found = Histogram(every.bounds)
        others = [self.by_priority.get(f"{name}/{each}", found) for each in PRIORITY_CLASSES if each != "normal"]
        if priority_class != "normal":
            return self.by_priority.get(f"{name}/{priority_class}", found)
        found.counts = [every.counts[i] - sum(each.counts[i] for each in others) for i in range(len(every.counts))]
        found.sum = every.sum - sum(each.sum for each in others)
        return found

    def _of_class(self, name: str, priority_class: str) -> Histogram:
        key = f"{name}/{priority_class}"
        histogram = self.by_priority.get(key)
        if histogram is None:
            histogram = self.by_priority[key] = Histogram(getattr(self, name).bounds)
        return histogram

    def snapshot(self) -> EngineMetricsSnapshot:
        """The current values, for another process."""
        found = EngineMetricsSnapshot(finished=dict(self.finished))
        for name, value in vars(self).items():
            match value:
                case Histogram():
                    found.histograms[name] = (list(value.counts), value.sum)
                case dict() if name == "by_priority":
                    found.histograms |= {key: (list(each.counts), each.sum) for key, each in value.items()}
                case int() if not name.startswith("_"):
                    found.counters[name] = value
        return found

    def merged_with(self, others: Iterable[EngineMetricsSnapshot]) -> EngineMetrics:
        """A sum of these metrics and those of other front ends. Neither is modified."""
        total = EngineMetrics(self._max_model_len)
        for snapshot in (self.snapshot(), *others):
            total.finished.update(snapshot.finished)
            for name, count in snapshot.counters.items():
                setattr(total, name, getattr(total, name) + count)
            for name, (counts, sum_) in snapshot.histograms.items():
                histogram = total._of_class(*name.split("/")) if "/" in name else getattr(total, name)
                histogram.counts = [a + b for a, b in zip(histogram.counts, counts)]
                histogram.sum += sum_
        return total

    def _observe_first_token(self, request: RequestState) -> int:
        """Records a request whose first token has arrived. Returns the number of its prompt tokens."""
        metrics = request.metrics
        assert metrics.first_token_time is not None
        self.time_to_first_token.observe(metrics.first_token_time - metrics.arrival_time)
        if request.priority_class is not None:
            histogram = self._of_class("time_to_first_token", request.priority_class)
            histogram.observe(metrics.first_token_time - metrics.arrival_time)
        self.prompt_tokens += request.num_prompt_tokens
        self.cached_prompt_tokens += request.num_cached_tokens
        return request.num_prompt_tokens

    def _observe_latencies(self, request: RequestState, num_generated: int) -> None:
        metrics = request.metrics
        arrived, scheduled = metrics.arrival_time, metrics.first_scheduled_time
        first, ended = metrics.first_token_time, metrics.finished_time
        last = max(sequence.last_token_time for sequence in request.sequences)
        if ended is None or scheduled is None or first is None:
            return  # aborted: its latencies are not known
        self.e2e_latency.observe(ended - arrived)
        if request.priority_class is not None:
            self._of_class("e2e_latency", request.priority_class).observe(ended - arrived)
        self.queue_time.observe(scheduled - arrived)
        self.prefill_time.observe(first - scheduled)
        self.decode_time.observe(last - first)
        self.inference_time.observe(last - scheduled)
        num_more = num_generated // len(request.sequences) - 1
        if num_more > 0:
            self.time_per_output_token.observe((last - first) / num_more)


def sum_scheduler_stats(each: Iterable[SchedulerStats], num_cores: int = 1) -> SchedulerStats:
    """The sum of several cores' stats; the mean of their KV cache usage."""
    total = SchedulerStats()
    for stats in each:
        total.num_running += stats.num_running
        total.num_waiting += stats.num_waiting
        total.kv_cache_usage += stats.kv_cache_usage / num_cores
        total.num_preemptions += stats.num_preemptions
        total.prefix_cache_queries += stats.prefix_cache_queries
        total.prefix_cache_hits += stats.prefix_cache_hits
        total.num_drafts += stats.num_drafts
        total.num_draft_tokens += stats.num_draft_tokens
        total.num_prompt_tokens += stats.num_prompt_tokens
        total.num_generated_tokens += stats.num_generated_tokens
        total.num_waiting_tokens += stats.num_waiting_tokens
        total.num_swapped += stats.num_swapped
        total.num_waiting_for_kv += stats.num_waiting_for_kv
        total.encoder_cache_queries += stats.encoder_cache_queries
        total.encoder_cache_hits += stats.encoder_cache_hits
        total.encoder_cache_rows += stats.encoder_cache_rows
        total.encoder_seconds += stats.encoder_seconds
        total.encoder_steps = _sum_lists(total.encoder_steps, stats.encoder_steps)
        for tier, tier_stats in stats.kv_tiers.items():
            total.kv_tiers[tier] = _sum_tier_stats(total.kv_tiers.get(tier), tier_stats)
        total.accepted_at = _sum_lists(total.accepted_at, stats.accepted_at)
    return total


def _sum_lists(one: list[int], other: list[int]) -> list[int]:
    return [sum(pair) for pair in zip_longest(one, other, fillvalue=0)]


def _sum_tier_stats(one: KVTierStats | None, other: KVTierStats) -> KVTierStats:
    if one is None:
        return other
    return KVTierStats(*(getattr(one, name) + getattr(other, name) for name in KVTierStats.__struct_fields__))


def _one_two_five_bounds(highest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `highest`."""
    bounds: list[float] = []
    step = 1
    while True:
        for factor in (1, 2, 5):
            if factor * step > highest:
                return tuple(bounds) or (1.0,)
            bounds.append(float(factor * step))
        step *= 10

"""Prometheus collector of an engine's metrics, with vLLM's metric names. Needs the package prometheus-client.

    registry.register(EngineCollector(engine, prefixes=("mvllm:",)))

The metrics are plain numbers in `EngineMetrics`, and are converted when Prometheus scrapes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from mvllm.config.engine_config import EngineConfig
from mvllm.config.model import ModelConfig
from mvllm.engine.core.kv_cache_sizing import KVCacheSummary
from mvllm.engine.metrics.stats import PRIORITY_CLASSES, EngineLoad, EngineMetrics, Histogram
from mvllm.messages.requests import ENCODER_SECONDS_BUCKETS, FinishReason, SchedulerStats

PREFIX = "mvllm:"


class MeasuredEngine(Protocol):
    """What AsyncLLM and LLMEngine tell about themselves."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def model_config(self) -> ModelConfig: ...
    @property
    def cache_summary(self) -> KVCacheSummary: ...
    @property
    def all_metrics(self) -> EngineMetrics: ...
    @property
    def stats(self) -> SchedulerStats | None: ...
    @property
    def load(self) -> EngineLoad: ...
    @property
    def is_asleep(self) -> bool: ...


class EngineCollector(Collector):
    """Reads the metrics of one engine. Callable in any thread.

    Args:
        engine: The engine.
        model_name: The label `model_name`; by default the configured model.
        prefixes: Prefixes of the metric names. Each metric is exported once per prefix, for dashboards of others.
    """

    def __init__(
        self, engine: MeasuredEngine, *, model_name: str | None = None, prefixes: Sequence[str] = (PREFIX,)
    ) -> None:
        self._engine = engine
        self._model_name = model_name if model_name is not None else engine.model_config.model
        self._prefixes = tuple(dict.fromkeys(prefixes))

    def collect(self) -> Iterator[Metric]:
        """All metrics, once per prefix."""
        metrics = self._engine.all_metrics
        for prefix in self._prefixes:
            yield from self._scalar_metrics(prefix, metrics)
            yield self._finish_reason_metric(prefix, metrics)
            yield from self._histograms(prefix, metrics)
            yield from self._priority_histograms(prefix, metrics)
            yield from self._encoder_metrics(prefix, self._engine.stats or SchedulerStats())
            yield from self._spec_decode_metrics(prefix, self._engine.stats or SchedulerStats())
            yield from self._kv_tier_metrics(prefix, self._engine.stats or SchedulerStats())
            yield self._cache_config(prefix)

    def describe(self) -> Iterator[Metric]:
        """Nothing: the registry then does not collect when it registers."""
        return iter(())

    @property
    def _labels(self) -> tuple[str]:
        return (self._model_name,)

    def _scalar_metrics(self, prefix: str, metrics: EngineMetrics) -> Iterator[Metric]:
        load, stats = self._engine.load, self._engine.stats or SchedulerStats()
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        for kind, name, text, value in (
            (gauge, "num_requests_running", "Sequences that are being generated.", load.num_running),
            (gauge, "num_requests_waiting", "Sequences that wait to be scheduled.", load.num_waiting),
            (gauge, "num_requests_swapped", "Of these, preempted with their KV in host memory.", stats.num_swapped),
            (gauge, "num_requests_waiting_for_kv", "Of these, loading their prefix.", stats.num_waiting_for_kv),
            (gauge, "kv_cache_usage_perc", "Fraction of the KV cache in use, 0 to 1.", load.kv_cache_usage),
            (gauge, "engine_sleep_state", "1 while the engine sleeps.", self._engine.is_asleep),
            (gauge, "engine_heartbeat_age_seconds", "Silence of an engine core that has work.", load.heartbeat_age),
            (counter, "prompt_tokens", "Prompt tokens of requests that have started.", metrics.prompt_tokens),
            (counter, "prompt_tokens_cached", "Of these, found in the prefix cache.", metrics.cached_prompt_tokens),
            (counter, "generation_tokens", "Generated tokens.", metrics.generation_tokens),
            (counter, "num_preemptions", "Preemptions of sequences.", stats.num_preemptions),
            (counter, "prefix_cache_queries", "Prompt tokens searched in the cache.", stats.prefix_cache_queries),
            (counter, "prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_cache_hits),
            (counter, "mm_cache_queries", "Images, audio and videos of prompts.", metrics.mm_cache_queries),
            (counter, "mm_cache_hits", "Of these, found processed.", metrics.mm_cache_hits),
            (gauge, "mm_inflight_bytes", "Bytes of items of unfinished prompts.", metrics.mm_inflight_bytes),
            (counter, "requests_refused", "Requests rejected because the queue was full.", metrics.refused),
        ):
            family = kind(prefix + name, text, labels=("model_name",))
            family.add_metric(self._labels, float(value))
            yield family

    def _encoder_metrics(self, prefix: str, stats: SchedulerStats) -> Iterator[Metric]:
        """Encoders of images and audio in the workers."""
        for kind, name, text, value in (
            (
                CounterMetricFamily,
                "encoder_cache_queries",
                "Images, audio and embeddings that sequences began to read.",
                stats.encoder_cache_queries,
            ),
            (
                CounterMetricFamily,
                "encoder_cache_hits",
                "Of these, found in the encoder cache.",
                stats.encoder_cache_hits,
            ),
            (
                GaugeMetricFamily,
                "encoder_cache_rows",
                "Rows of embeddings in the encoder cache.",
                stats.encoder_cache_rows,
            ),
        ):
            scalar = kind(prefix + name, text, labels=("model_name",))
            scalar.add_metric(self._labels, float(value))
            yield scalar
        histogram = Histogram(ENCODER_SECONDS_BUCKETS)
        if stats.encoder_steps:
            histogram.counts, histogram.sum = stats.encoder_steps, stats.encoder_seconds
        family = HistogramMetricFamily(
            prefix + "encoder_time_seconds", "Encoders of images and audio in one step.", labels=("model_name",)
        )
        family.add_metric(self._labels, cumulative_buckets(histogram), histogram.sum)
        yield family

    def _spec_decode_metrics(self, prefix: str, stats: SchedulerStats) -> Iterator[Metric]:
        speculative = self._engine.config.speculative
        labels = (*self._labels, "none" if speculative is None else speculative.method)
        for name, text, value in (
            ("num_drafts", "Verified drafts.", stats.num_drafts),
            ("num_draft_tokens", "Tokens of the verified drafts.", stats.num_draft_tokens),
            ("num_accepted_tokens", "Accepted draft tokens.", stats.num_accepted_tokens),
        ):
            family = CounterMetricFamily(f"{prefix}spec_decode_{name}", text, labels=("model_name", "method"))
            family.add_metric(labels, float(value))
            yield family
        for name, text, counts in (
            ("num_draft_tokens_per_pos", "Verified draft tokens, by their position in the draft.", stats.drafted_at),
            (
                "num_accepted_tokens_per_pos",
                "Accepted draft tokens, by their position in the draft.",
                stats.accepted_at,
            ),
        ):
            by_position = CounterMetricFamily(
                f"{prefix}spec_decode_{name}", text, labels=("model_name", "method", "position")
            )
            for position, count in enumerate(counts):
                by_position.add_metric((*labels, str(position)), float(count))
            yield by_position

    def _kv_tier_metrics(self, prefix: str, stats: SchedulerStats) -> Iterator[Metric]:
        """Blocks outside of the device, by tier: `host`, and the KV connectors."""
        for kind, name, text, field in (
            (GaugeMetricFamily, "bytes_used", "Bytes of blocks in the tier.", "bytes_used"),
            (
                GaugeMetricFamily,
                "bytes_limit",
                "Most bytes of blocks in the tier; 0 if it is not known.",
                "bytes_limit",
            ),
            (CounterMetricFamily, "loaded_blocks", "Blocks and states found in the tier and loaded.", "num_loaded"),
            (CounterMetricFamily, "saved_blocks", "Blocks and states saved to the tier.", "num_saved"),
            (CounterMetricFamily, "load_failures", "Loads that failed and were computed.", "num_load_failures"),
        ):
            family = kind(f"{prefix}kv_tier_{name}", text, labels=("model_name", "tier"))
            for tier, tier_stats in stats.kv_tiers.items():
                family.add_metric((*self._labels, tier), float(getattr(tier_stats, field)))
            yield family

    def _finish_reason_metric(self, prefix: str, metrics: EngineMetrics) -> Metric:
        family = CounterMetricFamily(
            prefix + "request_success", "Finished sequences.", labels=("model_name", "finished_reason")
        )
        for reason in FinishReason:
            family.add_metric((*self._labels, str(reason)), metrics.finished[str(reason)])
        return family

    def _histograms(self, prefix: str, metrics: EngineMetrics) -> Iterator[Metric]:
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From arrival to the first token.", metrics.time_to_first_token),
            ("inter_token_latency_seconds", "Between tokens.", metrics.inter_token_latency),
            ("request_time_per_output_token_seconds", "Mean per request.", metrics.time_per_output_token),
            ("e2e_request_latency_seconds", "From arrival to the last token.", metrics.e2e_latency),
            ("request_queue_time_seconds", "From arrival to the first schedule.", metrics.queue_time),
            ("request_prefill_time_seconds", "From the first schedule to the first token.", metrics.prefill_time),
            ("request_decode_time_seconds", "From the first to the last token.", metrics.decode_time),
            ("request_inference_time_seconds", "From the first schedule to the last token.", metrics.inference_time),
            ("request_prompt_tokens", "Tokens of the prompt.", metrics.request_prompt_tokens),
            ("request_generation_tokens", "Tokens generated for a request.", metrics.request_generation_tokens),
            (
                "request_max_num_generation_tokens",
                "Tokens of a request's longest sequence.",
                metrics.max_num_generation_tokens,
            ),
            ("request_params_n", "Requested sequences.", metrics.params_n),
            ("request_params_max_tokens", "Requested maximum of tokens.", metrics.params_max_tokens),
            ("mm_processing_time_seconds", "To fetch, decode and process an item.", metrics.mm_processing_time),
            ("iteration_tokens_total", "Prompt and output tokens of a step.", metrics.iteration_tokens),
        ):
            family = HistogramMetricFamily(prefix + name, text, labels=("model_name",))
            family.add_metric(self._labels, cumulative_buckets(histogram), histogram.sum)
            yield family

    def _priority_histograms(self, prefix: str, metrics: EngineMetrics) -> Iterator[Metric]:
        """The latencies by priority class, if requests may have a priority."""
        has_classes = self._engine.config.scheduler.policy == "priority"
        for attribute, name, text in (
            ("time_to_first_token", "time_to_first_token", "From arrival to the first token"),
            ("inter_token_latency", "inter_token_latency", "Between tokens"),
            ("e2e_latency", "e2e_request_latency", "From arrival to the last token"),
        ):
            family = HistogramMetricFamily(
                f"{prefix}{name}_by_priority_seconds",
                f"{text}, of requests with priority below 0 (high), 0 (normal) and above (low).",
                labels=("model_name", "priority"),
            )
            for priority_class in PRIORITY_CLASSES if has_classes else ():
                histogram = metrics.latency_of_class(attribute, priority_class)
                family.add_metric((*self._labels, priority_class), cumulative_buckets(histogram), histogram.sum)
            yield family

    def _cache_config(self, prefix: str) -> Metric:
        summary, cache = self._engine.cache_summary, self._engine.config.cache
        facts = {
            "model_name": self._model_name,
            "block_size": str(summary.block_size),
            "num_blocks": str(summary.num_blocks),
            "cache_dtype": cache.dtype,
            "enable_prefix_caching": str(cache.enable_prefix_caching),
            "num_state_slots": str(summary.num_state_slots),
        }
        family = GaugeMetricFamily(prefix + "cache_config_info", "The KV cache.", labels=tuple(facts))
        family.add_metric(tuple(facts.values()), 1)
        return family


def cumulative_buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Number of values up to each bound, in Prometheus' format."""
    buckets, total = [], 0
    for bound, count in zip((*histogram.bounds, float("inf")), list(histogram.counts)):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
    return buckets

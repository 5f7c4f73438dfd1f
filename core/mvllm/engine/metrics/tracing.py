"""OpenTelemetry spans of requests: the time in the queue, in prefill and in decode. Needs the extra `otel`.

    POST /v1/chat/completions  ├───────────────────────────────────┤  an HTTP response (server/tracing_middleware.py)
      chat demo                   ├─────────────────────────────┤      one prompt in the engine
        queue                     ├─────┤
        prefill                         ├───────┤
        decode                                  ├─────────────┤

Tracing measures nothing itself: a request records the times of its events anyway (RequestMetrics), and its spans are
written from them when it has ended. Written spans go into a bounded queue, from which a thread of the SDK sends them: a
slow or missing collector loses spans and never delays a request.

OpenTelemetry is imported when a Tracer is created.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mvllm.engine.frontend.request_state import RequestState
from mvllm.errors import ConfigError
from mvllm.installation import install_command
from mvllm.logging import get_logger
from mvllm.version import __version__

if TYPE_CHECKING:
    from opentelemetry.context import Context

logger = get_logger(__name__)

DEFAULT_PATH = "/v1/traces"
"""Default path of OTLP over HTTP; added to an endpoint without a path."""

OPERATION = "mvllm-operation"
"""Context key under which an entry point stores the value of `gen_ai.operation.name`."""

_SHUTDOWN_FLUSH_SECONDS = 2.0
_EXPORTER_LOGGER = "opentelemetry.exporter"


class Tracer:
    """Writes and sends spans. Callable in any thread.

    Sampling, headers, queue sizes and timeouts, and resource attributes come from OpenTelemetry's environment variables
    (`OTEL_...`).

    Args:
        endpoint: URL of a collector that accepts OTLP over HTTP.
        model_name: The value of `gen_ai.request.model`.

    Raises:
        ConfigError: The endpoint is not a valid URL, or OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str, model_name: str) -> None:
        self._endpoint = traces_endpoint(endpoint)
        self._model_name = model_name
        self._contexts: dict[RequestState, Context] = {}
        self._failed = False
        try:
            self._otel = _OpenTelemetry(self._endpoint)
        except ImportError as e:
            raise ConfigError(
                f"otlp_traces_endpoint is {endpoint!r}, which needs the SDK of OpenTelemetry and its exporter for OTLP "
                f"over HTTP; found: {e}. Run: {install_command('mvllm[otel]')}"
            ) from e

    @property
    def otel(self) -> _OpenTelemetry:
        """The OpenTelemetry objects of this tracer."""
        return self._otel

    def start_request(self, request: RequestState) -> None:
        """Records the start of a request. The caller's current span becomes the parent of the request's span."""
        self._contexts[request] = self._otel.context.get_current()

    def finish_request(self, request: RequestState, error: Exception | None = None) -> None:
        """Writes the spans of a request that has ended in any way.

        Args:
            error: The error that ended it, if its sequences have none.
        """
        parent = self._contexts.pop(request, None)
        if parent is None or self._failed:
            return
        try:
            self._write(request, parent, is_broken=error is not None)
        except Exception as e:
            self._failed = True  # tracing must not stop the engine
            logger.error("Spans of requests cannot be written; tracing is disabled.", exc_info=e)

    def close(self) -> None:
        """Sends the written spans, for two seconds at most. Idempotent."""
        # In a thread: in some versions of the SDK, an exporter that waits for its collector cannot be interrupted.
        closing = threading.Thread(target=self._otel.provider.shutdown, name="spans-end", daemon=True)
        closing.start()
        closing.join(_SHUTDOWN_FLUSH_SECONDS)

    def _write(self, request: RequestState, parent: Context, *, is_broken: bool) -> None:
        otel, times = self._otel, request.metrics
        to_wall_clock = _monotonic_to_wall()

        def wall(seconds: float) -> int:
            return round(seconds * 1e9) + to_wall_clock

        ended = times.finished_time or time.monotonic()
        operation = otel.context.get_value(OPERATION, parent) or "text_completion"
        span = otel.tracer.start_span(
            f"{operation} {self._model_name}",
            context=parent,
            attributes={
                "gen_ai.operation.name": str(operation),
                "gen_ai.request.model": self._model_name,
                **_span_attributes(request, ended),
            },
            start_time=wall(times.arrival_time),
        )
        if span.is_recording():
            within = otel.trace.set_span_in_context(span, parent)
            last = max((sequence.last_token_time for sequence in request.sequences), default=0.0)
            for name, start, end in (
                ("queue", times.arrival_time, times.first_scheduled_time),
                ("prefill", times.first_scheduled_time, times.first_token_time),
                ("decode", times.first_token_time, last),
            ):
                if start is not None:
                    part = otel.tracer.start_span(name, context=within, start_time=wall(start))
                    part.end(wall(end or ended))  # an unfinished phase lasts until the request ended
                if not end:
                    break
            if is_broken or any(sequence.finish_reason == "error" for sequence in request.sequences):
                span.set_status(otel.trace.StatusCode.ERROR, "The engine could not finish the request.")
                span.set_attribute("error.type", "engine_error")
        span.end(wall(ended))


def traces_endpoint(endpoint: str) -> str:
    """The URL to which spans are sent: `endpoint`, with the default path if it has none.

    Raises:
        ConfigError: `endpoint` is not an HTTP URL.
    """
    parts = urlsplit(endpoint)
    try:
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number
        valid = False
    if not valid:
        raise ConfigError(
            f"otlp_traces_endpoint is {endpoint!r}; it must be the URL of a collector that accepts OTLP over HTTP, "
            "such as http://localhost:4318/v1/traces."
        )
    return endpoint if parts.path.strip("/") else parts._replace(path=DEFAULT_PATH).geturl()


def _span_attributes(request: RequestState, ended: float) -> dict[str, Any]:
    """The span attributes of a request: its settings, counts and times, without any of its text."""
    params, times, sequences = request.params, request.metrics, request.sequences
    arrived, scheduled, first = times.arrival_time, times.first_scheduled_time, times.first_token_time
    attributes = {
        "gen_ai.request.id": request.request_id,
        "gen_ai.response.id": request.request_id,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.seed": params.seed,
        "gen_ai.response.finish_reasons": [sequence.finish_reason or "abort" for sequence in sequences],
        "gen_ai.usage.input_tokens": request.num_prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": request.num_cached_tokens,
        "gen_ai.usage.output_tokens": request.num_generated_tokens,
        "gen_ai.latency.e2e": ended - arrived,
    }
    if scheduled is not None:
        attributes["gen_ai.latency.time_in_queue"] = scheduled - arrived
        if first is not None:
            last = max(sequence.last_token_time for sequence in sequences)
            attributes["gen_ai.latency.time_to_first_token"] = first - arrived
            attributes["gen_ai.latency.time_in_model_prefill"] = first - scheduled
            attributes["gen_ai.latency.time_in_model_decode"] = last - first
            attributes["gen_ai.latency.time_in_model_inference"] = last - scheduled
    return {name: value for name, value in attributes.items() if value is not None}


def _monotonic_to_wall() -> int:
    """Nanoseconds to add to the monotonic clock to get the wall clock, which spans use.

    Reads the wall clock between two readings of the monotonic clock, three times, and uses the shortest interval.
    """
    readings = ((time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(3))
    before, wall, after = min(readings, key=lambda reading: reading[2] - reading[0])
    return wall - (before + after) // 2


class _OpenTelemetry:
    """The OpenTelemetry modules, with a provider that sends to one endpoint.

    The process's global OpenTelemetry configuration is not changed.

    Raises:
        ImportError: Something is not installed.
    """

    def __init__(self, endpoint: str) -> None:
        self.context = importlib.import_module("opentelemetry.context")
        self.trace = importlib.import_module("opentelemetry.trace")
        self.propagate = importlib.import_module("opentelemetry.propagate")
        resources = importlib.import_module("opentelemetry.sdk.resources")
        sdk = importlib.import_module("opentelemetry.sdk.trace")
        export = importlib.import_module("opentelemetry.sdk.trace.export")
        otlp = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        ours = resources.Resource({"service.name": "mvllm", "service.version": __version__})
        detected = resources.OTELResourceDetector().detect()  # values of the environment take precedence
        logging.getLogger(_EXPORTER_LOGGER).setLevel(logging.CRITICAL)  # it logs every attempt
        exporter = _LoggingExporter(otlp.OTLPSpanExporter(endpoint=endpoint), export.SpanExportResult, endpoint)
        self.provider = sdk.TracerProvider(
            resource=resources.Resource.create().merge(ours).merge(detected), shutdown_on_exit=False
        )
        self.provider.add_span_processor(export.BatchSpanProcessor(exporter))
        self.tracer = self.provider.get_tracer("mvllm", __version__)


class _LoggingExporter:
    """An exporter that logs when spans start to be lost and when sending works again, not every attempt.

    Args:
        exporter: The exporter that sends the spans.
        results: OpenTelemetry's SpanExportResult.
        endpoint: The collector's URL, for the log.
    """

    def __init__(self, exporter: Any, results: Any, endpoint: str) -> None:
        self._exporter = exporter
        self._results = results
        self._endpoint = endpoint
        self._is_losing_spans = False

    def export(self, spans: Any) -> Any:
        """Sends spans. A failure loses them and raises nothing."""
        reason = ""
        try:
            result = self._exporter.export(spans)
        except Exception as e:  # noqa: BLE001  (logged below; the sending thread continues)
            result, reason = self._results.FAILURE, f" ({type(e).__name__}: {e})"
        are_lost = result is not self._results.SUCCESS
        if are_lost and not self._is_losing_spans:
            logger.warning("The collector at %s accepts no spans%s; they are lost.", self._endpoint, reason)
        elif self._is_losing_spans and not are_lost:
            logger.info("The collector at %s accepts spans again.", self._endpoint)
        self._is_losing_spans = are_lost
        return result

    def shutdown(self) -> None:
        """Shuts the exporter down."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Returns True: this exporter buffers nothing."""
        return True

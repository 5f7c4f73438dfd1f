"""The spans that a Tracer writes. tests/e2e/server tests the transfer to a collector."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from mvllm import SamplingParams
from mvllm.engine.frontend.input_processor import ProcessedRequest
from mvllm.engine.frontend.output_processor import OutputProcessor
from mvllm.engine.frontend.parallel_sampling import CoreRequestIds
from mvllm.engine.metrics.tracing import Tracer, traces_endpoint
from mvllm.errors import ConfigError, EngineDeadError
from mvllm.messages.requests import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason

NOBODY = "http://127.0.0.1:9/v1/traces"


@pytest.fixture
def tracer() -> Iterator[Tracer]:
    tracer = Tracer(NOBODY, "small")
    yield tracer
    tracer.close()


@pytest.fixture
def written(tracer: Tracer) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    tracer.otel.provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter


class Run:
    """A request that arrived ten seconds ago."""

    def __init__(self, **params: object) -> None:
        self.arrived = time.monotonic() - 10
        core = EngineCoreRequest(
            request_id="r",
            prompt_token_ids=[1, 2, 3],
            sampling_params=SamplingParams(**params),  # type: ignore[arg-type]
            arrival_time=self.arrived,
        )
        self.processor = OutputProcessor(None, CoreRequestIds())
        request = ProcessedRequest(None, core.sampling_params, core)
        self.state, self.children = self.processor.add_request(request)

    def step(self, ids: list[int], finish: FinishReason | None = None, scheduled: float = 0.0) -> None:
        output = EngineCoreOutput(self.children[0].request_id, ids, finish)
        output.scheduled_time = scheduled
        self.processor.process_outputs(EngineCoreOutputs(outputs=[output]))


def named(written: InMemorySpanExporter) -> dict[str, tuple[float, dict[str, object]]]:
    """The duration in seconds and the attributes of each span, by name."""
    spans = written.get_finished_spans()
    return {s.name: ((s.end_time - s.start_time) / 1e9, dict(s.attributes or {})) for s in spans}  # type: ignore


def test_spans_have_the_times_of_the_phases(tracer: Tracer, written: InMemorySpanExporter) -> None:
    run = Run(max_tokens=5)
    tracer.start_request(run.state)
    run.step([7], scheduled=run.arrived + 4)
    run.step([8], FinishReason.STOP)
    assert not written.get_finished_spans()
    tracer.finish_request(run.state)
    spans = named(written)
    assert list(spans) == ["queue", "prefill", "decode", "text_completion small"]
    assert spans["queue"][0] == pytest.approx(4, abs=1e-3) and spans["prefill"][0] == pytest.approx(6, abs=1)
    seconds, facts = spans["text_completion small"]
    assert facts["gen_ai.latency.e2e"] == pytest.approx(seconds, abs=1e-3)
    assert facts["gen_ai.response.finish_reasons"] == ("stop",)
    assert (facts["gen_ai.usage.input_tokens"], facts["gen_ai.usage.output_tokens"]) == (3, 2)


def test_an_unscheduled_request_has_a_queue_span_only(tracer: Tracer, written: InMemorySpanExporter) -> None:
    run = Run(n=2)
    tracer.start_request(run.state)
    tracer.finish_request(run.state)
    spans = named(written)
    assert list(spans) == ["queue", "text_completion small"]
    assert spans["queue"][0] == pytest.approx(10, abs=1)
    assert spans["text_completion small"][1]["gen_ai.response.finish_reasons"] == ("abort", "abort")


def test_a_request_that_failed_has_an_error_span(tracer: Tracer, written: InMemorySpanExporter) -> None:
    failed, died = Run(), Run()
    for run in (failed, died):
        tracer.start_request(run.state)
    failed.step([], FinishReason.ERROR, scheduled=failed.arrived + 1)
    tracer.finish_request(failed.state)
    tracer.finish_request(died.state, EngineDeadError("It has stopped."))
    roots = [span for span in written.get_finished_spans() if span.name == "text_completion small"]
    assert [span.status.status_code for span in roots] == [trace.StatusCode.ERROR] * 2
    assert all(span.attributes and span.attributes["error.type"] == "engine_error" for span in roots)


def test_the_parent_is_the_span_that_was_current_at_arrival(tracer: Tracer, written: InMemorySpanExporter) -> None:
    run = Run()
    with tracer.otel.tracer.start_as_current_span("theirs") as theirs:
        tracer.start_request(run.state)
    tracer.finish_request(run.state)
    [span] = [span for span in written.get_finished_spans() if span.name == "text_completion small"]
    assert span.parent is not None and span.parent.span_id == theirs.get_span_context().span_id


def test_a_request_ends_once(tracer: Tracer, written: InMemorySpanExporter) -> None:
    run = Run()
    tracer.finish_request(run.state)
    assert not written.get_finished_spans()
    tracer.start_request(run.state)
    for _ in range(2):
        tracer.finish_request(run.state)
    assert len(written.get_finished_spans()) == 2


def test_a_failing_tracer_logs_once_and_raises_nothing(tracer: Tracer, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("mvllm.engine.metrics.tracing._span_attributes", lambda *_: 1 / 0)
    monkeypatch.setattr("mvllm.engine.metrics.tracing.logger.error", lambda text, **_: said.append(text))
    for _ in range(2):
        run = Run()
        tracer.start_request(run.state)
        tracer.finish_request(run.state)
    assert said == ["Spans of requests cannot be written; tracing is disabled."]


def test_the_process_keeps_its_own_opentelemetry_configuration(tracer: Tracer) -> None:
    assert trace.get_tracer_provider() is not tracer.otel.provider


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("https://collector/", "https://collector/v1/traces"),
        ("http://[::1]:4318/v1/traces", "http://[::1]:4318/v1/traces"),
        ("http://collector/of/mine", "http://collector/of/mine"),
    ],
)
def test_endpoints(given: str, used: str) -> None:
    assert traces_endpoint(given) == used


@pytest.mark.parametrize(
    "wrong", ["", "localhost:4317", "grpc://localhost:4317", "http://", "http://a:b/", "/v1/traces"]
)
def test_invalid_endpoints_are_rejected(wrong: str) -> None:
    with pytest.raises(ConfigError, match="OTLP over HTTP"):
        traces_endpoint(wrong)

"""Spans of requests arrive at an OTLP collector; a collector that does not answer delays no request."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.helpers.processes import wait_until
from tests.helpers.server import SMALL, ServerProcess, wait_idle

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{CALLER}-01"
STORY = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "What is the capital of Italy?"}], "max_tokens": 8, "temperature": 0}


class Collector:
    """An OTLP receiver: stores the spans, or blocks its senders."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.paths: set[str] = set()
        self.service: dict[str, Any] = {}
        self.num_held = 0
        self.answers = threading.Event()
        self.answers.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if not collector.answers.is_set():
                    collector.num_held += 1
                    collector.answers.wait()
                collector._take(self.path, body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *unused: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _take(self, path: str, body: bytes) -> None:
        self.paths.add(path)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.service = {entry.key: plain(entry.value) for entry in resource.resource.attributes}
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]

    def trace(self, trace: str, roots: int = 1) -> list[Span]:
        """The spans of a trace, once its HTTP server spans, which are written last, have arrived."""

        def found() -> list[Span]:
            return [span for span in self.spans if span.trace_id.hex() == trace]

        wait_until(lambda: sum(s.kind == Span.SPAN_KIND_SERVER for s in found()) >= roots, 60, lambda: str(found()))
        return found()

    def close(self) -> None:
        self.answers.set()
        self._server.shutdown()
        self._server.server_close()


def plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(each) for each in value.array_value.values]
    return getattr(value, kind)


def attributes(span: Span) -> dict[str, Any]:
    return {entry.key: plain(entry.value) for entry in span.attributes}


def children(spans: list[Span], parent: Span) -> list[Span]:
    return [span for span in spans if span.parent_span_id == parent.span_id]


def traceparent(number: int) -> tuple[str, dict[str, str]]:
    """A new trace context for a request."""
    trace = f"{number:032x}"
    return trace, {"traceparent": f"00-{trace}-{CALLER}-01"}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def server(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    options = ("--port", "0", "--api-key", "k", "--otlp-traces-endpoint", collector.url)
    often = {"OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_SERVICE_NAME": "stories", "NO_PROXY": "127.0.0.1"}
    with ServerProcess(tmp_path_factory.mktemp("traced"), "demo", *options, *SMALL, **often) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx2.Client]:
    with server.client(headers={"Authorization": "Bearer k"}) as client:
        yield client


def test_a_request_is_a_trace_with_the_callers_parent(client: httpx2.Client, collector: Collector) -> None:
    answer = client.post("/v1/chat/completions", json=CHAT, headers={"traceparent": TRACEPARENT}).json()
    spans = collector.trace(TRACE)
    assert len(spans) == 5
    [root] = [span for span in spans if span.parent_span_id.hex() == CALLER]
    assert (root.name, root.kind) == ("POST /v1/chat/completions", Span.SPAN_KIND_SERVER)
    assert attributes(root)["http.response.status_code"] == 200
    [request] = children(spans, root)
    assert request.name == "chat demo"
    facts = attributes(request)
    assert facts["gen_ai.operation.name"] == "chat" and facts["gen_ai.request.model"] == "demo"
    assert facts["gen_ai.response.id"] == answer["id"]
    assert facts["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert facts["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"]
    assert facts["gen_ai.response.finish_reasons"] == [answer["choices"][0]["finish_reason"]]
    assert (facts["gen_ai.request.max_tokens"], facts["gen_ai.request.temperature"]) == (8, 0.0)
    queue, prefill, decode = sorted(children(spans, request), key=lambda span: span.start_time_unix_nano)
    assert [span.name for span in (queue, prefill, decode)] == ["queue", "prefill", "decode"]
    assert root.start_time_unix_nano <= request.start_time_unix_nano == queue.start_time_unix_nano
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano
    assert decode.end_time_unix_nano <= request.end_time_unix_nano <= root.end_time_unix_nano
    for name, span in (("queue", queue), ("model_prefill", prefill), ("model_decode", decode)):
        seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        assert facts[f"gen_ai.latency.time_in_{name}"] == pytest.approx(seconds, abs=1e-6)
    assert collector.paths == {"/v1/traces"} and collector.service["service.name"] == "stories"


def test_no_content_is_in_a_span(client: httpx2.Client, collector: Collector) -> None:
    trace, headers = traceparent(1)
    answer = client.post("/v1/completions", json={**STORY, "prompt": "A dog named"}, headers=headers).json()
    told = str(collector.trace(trace))
    assert "A dog named" not in told and answer["choices"][0]["text"].strip() not in told


def test_each_prompt_of_a_stream_has_a_span(client: httpx2.Client, collector: Collector) -> None:
    trace, headers = traceparent(2)
    ask = {**STORY, "prompt": ["Once upon", "A dog"], "n": 2, "temperature": 1, "stream": True}
    assert client.post("/v1/completions", json=ask, headers=headers).text.endswith("[DONE]\n\n")
    spans = collector.trace(trace)
    requests = [span for span in spans if span.name == "text_completion demo"]
    assert len(requests) == 2 and len(spans) == 1 + 2 * 4
    for request in requests:
        facts = attributes(request)
        assert facts["gen_ai.response.finish_reasons"] == ["length", "length"]
        assert facts["gen_ai.usage.output_tokens"] == 24 and facts["gen_ai.request.choice.count"] == 2


def test_a_disconnect_ends_the_spans(client: httpx2.Client, collector: Collector) -> None:
    trace, headers = traceparent(3)
    with client.stream(
        "POST", "/v1/completions", json={**STORY, "max_tokens": 900, "stream": True}, headers=headers
    ) as r:
        next(r.iter_raw())
    [request] = [span for span in collector.trace(trace) if span.name == "text_completion demo"]
    facts = attributes(request)
    assert facts["gen_ai.response.finish_reasons"] == ["abort"] and 0 < facts["gen_ai.usage.output_tokens"] < 900


def test_a_rejected_request_has_no_span_of_the_engine(client: httpx2.Client, collector: Collector) -> None:
    trace, headers = traceparent(4)
    assert client.post("/v1/completions", json={**STORY, "temperature": -1}, headers=headers).status_code == 400
    [root] = collector.trace(trace)
    assert attributes(root)["http.response.status_code"] == 400


def test_an_unsampled_trace_has_no_spans(client: httpx2.Client, collector: Collector) -> None:
    """Traces without sampling, without a key, or on trivial routes have no spans; an invalid header does no harm."""
    unsampled, unknown, health = f"{5:032x}", f"{6:032x}", f"{7:032x}"
    for headers in ({"traceparent": f"00-{unsampled}-{CALLER}-00"}, {"traceparent": "00-" + "x" * 5000}):
        assert client.post("/v1/completions", json=STORY, headers=headers).status_code == 200
    nobody = {"traceparent": f"00-{unknown}-{CALLER}-01", "Authorization": "Bearer other"}
    assert client.post("/v1/completions", json=STORY, headers=nobody).status_code == 401
    assert client.get("/health", headers={"traceparent": f"00-{health}-{CALLER}-01"}).status_code == 200
    trace, headers = traceparent(8)
    client.post("/v1/completions", json=STORY, headers=headers)
    collector.trace(trace)
    assert not {unsampled, unknown, health} & {span.trace_id.hex() for span in collector.spans}


def test_a_collector_that_does_not_answer_loses_spans_but_no_request(
    client: httpx2.Client, collector: Collector, server: ServerProcess
) -> None:
    """More requests than the span queue holds are answered while the collector is silent. Must be the last test: the
    collector stops for good, and the server still shuts down cleanly."""
    collector.answers.clear()
    client.post("/v1/completions", json=STORY)
    wait_until(lambda: collector.num_held, 60, "spans are sent")
    short = {**STORY, "prompt": ["A dog"] * 100, "max_tokens": 1}  # 401 spans
    for _ in range(6):
        assert client.post("/v1/completions", json=short).status_code == 200
    wait_idle(client)
    collector.close()
    assert client.post("/v1/completions", json=STORY).status_code == 200
    server.process.terminate()
    assert server.wait(60) == 0, server.log[-3000:]
    assert "Traceback" not in server.log


def test_an_invalid_endpoint_is_a_one_line_error(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "demo", "--otlp-traces-endpoint", "localhost:4317", *SMALL) as server:
        assert server.wait(120) == 1
    assert "must be the URL of a collector" in server.log and "Traceback" not in server.log


WITHOUT_OTEL = """
import json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter")):  # the rest is FastAPI's, too
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import mvllm.entrypoints.openai.server.api_server, mvllm.engine.async_llm
from mvllm.engine.metrics.tracing import Tracer
from mvllm.errors import ConfigError
try:
    Tracer("http://localhost:4318", "demo")
except ConfigError as e:
    print(json.dumps([str(e), [name for name in sys.modules if "opentelemetry.sdk" in name]]))
"""


def test_without_the_extra_the_server_works_and_the_option_names_the_missing_package() -> None:
    """The server's modules import no OpenTelemetry module: they load without the package."""
    ran = subprocess.run([sys.executable, "-c", WITHOUT_OTEL], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    message, loaded = json.loads(ran.stdout)
    assert "pip install 'opentelemetry-exporter-otlp-proto-http" in message and "No module named" in message
    assert loaded == []

"""Middleware that records an OpenTelemetry span for each HTTP request: the parent of the engine's spans of its prompts.

A span belongs to the trace of the request's `traceparent` header, if it has one. The middleware is used only with
`--otlp-traces-endpoint`, and runs after authentication, so that requests without a valid key have no spans.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mvllm.engine.metrics.tracing import OPERATION, Tracer

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/pooling": "pooling",
    "/classify": "classify",
    "/score": "score",
    "/v1/score": "score",
    "/rerank": "rerank",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
}
"""Core's paths that have spans, with their operation names."""


class TracingMiddleware:
    """The ASGI middleware. See the module.

    Args:
        app: The application.
        tracer: Exports the spans.
        more_operations: Further paths that have spans, with their operation names.
    """

    def __init__(self, app: ASGIApp, tracer: Tracer, more_operations: Mapping[str, str]) -> None:
        self._app = app
        self._operations = {**_OPERATIONS, **more_operations}
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        operation = self._operations.get(scope["path"])
        if operation is None:
            await self._app(scope, receive, send)
            return
        otel = self._tracer.otel
        method, path = scope["method"], scope["path"]
        parent = otel.propagate.extract(_carrier(scope))
        span = otel.tracer.start_span(
            f"{method} {path}",
            context=parent,
            kind=otel.trace.SpanKind.SERVER,
            attributes={"http.request.method": method, "http.route": path, "url.path": path},
        )
        status = 0

        async def send_and_record_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        context = otel.context.set_value(OPERATION, operation, otel.trace.set_span_in_context(span, parent))
        token = otel.context.attach(context)
        try:
            await self._app(scope, receive, send_and_record_status)
        finally:
            otel.context.detach(token)
            if status:
                span.set_attribute("http.response.status_code", status)
            if status >= 500:
                span.set_status(otel.trace.StatusCode.ERROR)
                span.set_attribute("error.type", str(status))
            span.end()


def _carrier(scope: Scope) -> dict[str, str]:
    """The headers of a request for OpenTelemetry's propagators; repeated headers are joined."""
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        key = name.decode("latin-1")
        text = value.decode("latin-1")
        found[key] = f"{found[key]},{text}" if key in found else text
    return found

"""The span of an answer over HTTP, for OpenTelemetry: the parent of what its prompts do in the engine.

A client that is itself part of a trace says so in the header `traceparent`; the answer's span then belongs to it. This
layer is there only where `--otlp-traces-endpoint` asks for it, and inside the gate: who has no key leaves no span.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mvllm.engine.metrics.tracing import OPERATION, Tracer

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
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
"""Paths that have spans, and what they are for; others are of no interest to who follows a request."""


class TracingMiddleware:
    """A layer around the server.

    Args:
        app: What is inside.
        tracer: Where spans go.
    """

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        operation = _OPERATIONS.get(scope["path"])
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

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        within = otel.context.set_value(OPERATION, operation, otel.trace.set_span_in_context(span, parent))
        token = otel.context.attach(within)
        try:
            await self._app(scope, receive, note_status)
        finally:
            otel.context.detach(token)
            if status:
                span.set_attribute("http.response.status_code", status)
            if status >= 500:
                span.set_status(otel.trace.StatusCode.ERROR)
                span.set_attribute("error.type", str(status))
            span.end()


def _carrier(scope: Scope) -> dict[str, str]:
    """The headers of a request as propagators read them; of one that comes twice, both."""
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        key = name.decode("latin-1")
        text = value.decode("latin-1")
        found[key] = f"{found[key]},{text}" if key in found else text
    return found

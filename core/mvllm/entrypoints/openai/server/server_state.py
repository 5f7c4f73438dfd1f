"""The server's phase, its requests in flight, and its health.

LOADING ── the engine is ready ──> READY ── SIGTERM ──> DRAINING ──> end, exit status 0
   └─────────────── the engine fails ──> DEAD ──> end, exit status 1
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
from collections.abc import Awaitable, Callable

from mvllm.engine.async_llm import AsyncLLM
from mvllm.entrypoints.openai.common.errors import APIError
from mvllm.entrypoints.openai.common.serving_context import ServingContext
from mvllm.entrypoints.openai.server.shared_metrics import MetricsPublisher
from mvllm.entrypoints.openai.server.stall_watchdog import StallWatchdog


class ServerPhase(enum.Enum):
    """The phases of a server. See the module."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class ServerState:
    """The state of one server process, which all routes share.

    Args:
        heartbeat_timeout: Seconds without a heartbeat of the engine after which the server is unhealthy.
        publisher: Publishes the metrics of this process, for a server of several.

    Attributes:
        phase: The current phase.
        started: Monotonic time of the start.
        num_in_flight: Requests to the engine whose response has not ended, in this process.
        watchdog: Watches the requests of a loaded engine.
    """

    def __init__(self, heartbeat_timeout: float, publisher: MetricsPublisher | None = None) -> None:
        self.phase = ServerPhase.LOADING
        self.started = time.monotonic()
        self.num_in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._heartbeat_timeout = heartbeat_timeout
        self._publisher = publisher
        self._context: ServingContext | None = None
        self._closers: list[Callable[[], Awaitable[None]]] = []
        self.watchdog: StallWatchdog | None = None

    def add_closer(self, close: Callable[[], Awaitable[None]]) -> None:
        """Adds what `close` calls: the end of something that routes use."""
        self._closers.append(close)

    async def close(self) -> None:
        """Ends what routes use, after the last response."""
        for close in self._closers:
            await close()
        self._closers.clear()

    def set_ready(self, context: ServingContext) -> None:
        """Requests are accepted from now on."""
        self._context = context
        self.phase = ServerPhase.READY

    @property
    def loaded_context(self) -> ServingContext | None:
        """What runs requests, or None while the model is being loaded."""
        return self._context

    @property
    def loaded_engine(self) -> AsyncLLM | None:
        """The engine, or None while it is being loaded."""
        return None if self._context is None else self._context.engine

    @property
    def context(self) -> ServingContext:
        """What runs a new request.

        Raises:
            APIError: The server does not accept requests (503).
        """
        if self.phase is ServerPhase.READY and self._context is not None:
            return self._context
        if self.phase is ServerPhase.LOADING:
            raise APIError(503, "The model is being loaded; try again soon.", code="loading", retry_after=2)
        if self.phase is ServerPhase.DRAINING:
            raise APIError(503, "The server is shutting down.", code="shutting_down", retry_after=5)
        raise APIError(503, "The engine has stopped; the server is shutting down.", code="engine_dead", retry_after=30)

    @property
    def engine(self) -> AsyncLLM:
        """The engine, for a new request. Raises as `context`."""
        return self.context.engine

    def request_started(self) -> None:
        """Counts a new request to the engine."""
        self.num_in_flight += 1
        self._idle.clear()
        self.publish_metrics()

    def request_finished(self) -> None:
        """Counts the end of a response."""
        self.num_in_flight -= 1
        if self.num_in_flight == 0:
            self._idle.set()
        self.publish_metrics()

    def publish_metrics(self) -> None:
        """Publishes the metrics of this process soon, if there are others."""
        if self._publisher is not None:
            self._publisher.schedule_publish()

    async def wait_idle(self, seconds: float) -> None:
        """Waits until no requests are in flight, at most so long."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)

    @property
    def total_num_in_flight(self) -> int:
        """Requests in flight in all processes of this server."""
        others = 0 if self._publisher is None else self._publisher.shared.other_num_in_flight()
        return self.num_in_flight + others

    def unhealthy_reason(self) -> str | None:
        """Why the process should be restarted; None if it is healthy. Does not block."""
        if self.phase is ServerPhase.DEAD:
            return "the engine has stopped"
        engine = self.loaded_engine
        if engine is None:
            return None
        if engine.errored:
            return "the engine has stopped"
        age = engine.heartbeat_age
        if age > self._heartbeat_timeout:
            return f"the engine has given no sign of life for {age:.0f} s"
        return None

    def loading_reason(self) -> str | None:
        """Says that the model is still being loaded; None if it is not."""
        return f"the server is {self.phase.value}" if self.phase is ServerPhase.LOADING else None

    def not_ready_reason(self) -> str | None:
        """Why the server should get no requests; None if it is ready."""
        if (reason := self.unhealthy_reason()) is not None:
            return reason
        if self.phase is not ServerPhase.READY:
            return f"the server is {self.phase.value}"
        if (engine := self.loaded_engine) is not None and engine.is_asleep:
            return "the engine sleeps"
        return None

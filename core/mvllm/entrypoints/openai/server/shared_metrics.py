"""Metrics of several API servers in shared memory, so that each of them can report the totals of all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from mvllm.engine.metrics.shared_metrics_pages import SharedMetricsPages
from mvllm.engine.metrics.stats import EngineMetricsSnapshot
from mvllm.entrypoints.openai.server.http_metrics import HTTPMetricsSnapshot

_SOON_SECONDS = 0.02
_BUSY_SECONDS = 0.25


class ServerMetricsSnapshot(msgspec.Struct, array_like=True):
    """The metrics of one API server.

    Attributes:
        num_in_flight: Requests to the engine whose response has not ended.
        http: Of its HTTP responses.
        engine: Of its engine requests.
    """

    num_in_flight: int
    http: HTTPMetricsSnapshot
    engine: EngineMetricsSnapshot


class SharedServerMetrics:
    """Writes one server's metrics and reads those of the others. Used in the event loop's thread.

    Args:
        pages: Shared memory with a page for each server.
        page: Index of this server's page.
    """

    def __init__(self, pages: SharedMetricsPages, page: int) -> None:
        self._pages = pages
        self._page = page
        self._decoder = msgspec.msgpack.Decoder(ServerMetricsSnapshot)
        self._encoder = msgspec.msgpack.Encoder()

    @classmethod
    def of_one_server(cls) -> SharedServerMetrics:
        """The metrics of a server that shares the engine with no other."""
        return cls(SharedMetricsPages.create(1), 0)

    def write(self, metrics: ServerMetricsSnapshot) -> None:
        """Publishes the metrics of this server."""
        self._pages.write(self._page, self._encoder.encode(metrics))

    def other_servers(self) -> list[ServerMetricsSnapshot]:
        """The metrics of the other servers."""
        return [self._decoder.decode(data) for data in self._pages.read_others(self._page)]

    def other_engine_metrics(self) -> list[EngineMetricsSnapshot]:
        """The engine metrics of the other servers."""
        return [metrics.engine for metrics in self.other_servers()]

    def other_http_metrics(self) -> list[HTTPMetricsSnapshot]:
        """The HTTP metrics of the other servers."""
        return [metrics.http for metrics in self.other_servers()]

    def other_num_in_flight(self) -> int:
        """Requests in flight in the other servers."""
        return sum(metrics.num_in_flight for metrics in self.other_servers())


class MetricsPublisher:
    """Publishes one server's metrics shortly after a change, and periodically while requests are in flight.

    Used in the event loop's thread.

    Args:
        shared: The metrics of all servers.
        collect: Returns those of this server; None before its engine is loaded.

    Attributes:
        shared: As given.
    """

    def __init__(self, shared: SharedServerMetrics, collect: Callable[[], ServerMetricsSnapshot | None]) -> None:
        self.shared = shared
        self._collect = collect
        self._timer: asyncio.TimerHandle | None = None

    def schedule_publish(self) -> None:
        """Publishes the metrics soon. To be called after a change."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_SOON_SECONDS, self._publish)

    def _publish(self) -> None:
        self._timer = None
        metrics = self._collect()
        if metrics is None:
            return
        self.shared.write(metrics)
        if metrics.num_in_flight:
            self._timer = asyncio.get_running_loop().call_later(_BUSY_SECONDS, self._publish)

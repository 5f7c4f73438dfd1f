"""What one of several API servers counts, for the others to show: each of them answers for all.

Figures go onto the board a moment after something has changed, and again and again while requests are under way.
"""

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
    """Everything that one API server has counted.

    Attributes:
        in_flight: Requests to the engine that have not been answered to the end.
        http: Of its answers.
        engine: Of its part of the engine.
    """

    num_in_flight: int
    http: HTTPMetricsSnapshot
    engine: EngineMetricsSnapshot


class SharedServerMetrics:
    """Used in the loop's thread.

    Args:
        board: Where the figures of all servers are.
        page: This one's.
    """

    def __init__(self, board: SharedMetricsPages, page: int) -> None:
        self._pages = board
        self._page = page
        self._collect: Callable[[], ServerMetricsSnapshot] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._decoder = msgspec.msgpack.Decoder(ServerMetricsSnapshot)
        self._encoder = msgspec.msgpack.Encoder()

    def start(self, collect: Callable[[], ServerMetricsSnapshot]) -> None:
        """From now on, `touch` takes effect."""
        self._collect = collect
        self.schedule_publish()

    def schedule_publish(self) -> None:
        """Something has changed."""
        if self._timer is None and self._collect is not None:
            self._timer = asyncio.get_running_loop().call_later(_SOON_SECONDS, self._publish)

    def other_servers(self) -> list[ServerMetricsSnapshot]:
        """What the other servers have counted."""
        return [self._decoder.decode(data) for data in self._pages.read_others(self._page)]

    def other_engine_metrics(self) -> list[EngineMetricsSnapshot]:
        """Of these, the engine's."""
        return [figures.engine for figures in self.other_servers()]

    def other_http_metrics(self) -> list[HTTPMetricsSnapshot]:
        """Of these, those of HTTP."""
        return [figures.http for figures in self.other_servers()]

    def num_in_flight_elsewhere(self) -> int:
        """Requests under way in the other servers."""
        return sum(figures.num_in_flight for figures in self.other_servers())

    def _publish(self) -> None:
        self._timer = None
        assert self._collect is not None
        figures = self._collect()
        self._pages.write(self._page, self._encoder.encode(figures))
        if figures.num_in_flight:
            self._timer = asyncio.get_running_loop().call_later(_BUSY_SECONDS, self._publish)

"""Periodic log line with the engine's load: every ten seconds while the engine is busy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from mvllm.engine.metrics.stats import EngineLoad
from mvllm.logging import get_logger
from mvllm.messages.requests import SchedulerStats

logger = get_logger(__name__)

INTERVAL_SECONDS = 10.0


class PeriodicStatsLog:
    """Writes the log line from a timer of the event loop. Used in the loop's thread.

    Args:
        load, stats: Return the engine's current load and scheduler state.
    """

    def __init__(self, load: Callable[[], EngineLoad], stats: Callable[[], SchedulerStats]) -> None:
        self._load = load
        self._stats = stats
        self._timer: asyncio.TimerHandle | None = None
        self._queries = self._hits = 0

    def schedule(self) -> None:
        """Schedules a line in ten seconds, unless one is scheduled already."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(INTERVAL_SECONDS, self._write)

    def close(self) -> None:
        """Cancels the scheduled line. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _write(self) -> None:
        self._timer = None
        load, stats = self._load(), self._stats()
        queries, hits = stats.prefix_cache_queries - self._queries, stats.prefix_cache_hits - self._hits
        self._queries, self._hits = stats.prefix_cache_queries, stats.prefix_cache_hits
        logger.info(
            "Prompt %.1f tokens/s, generation %.1f tokens/s, running %d, waiting %d, KV cache %.1f %%, "
            "prefix hits %.1f %%",
            load.prompt_tokens_per_second,
            load.generation_tokens_per_second,
            load.num_running,
            load.num_waiting,
            100 * load.kv_cache_usage,
            100 * hits / queries if queries else 0.0,
        )
        if load.num_requests:
            self.schedule()

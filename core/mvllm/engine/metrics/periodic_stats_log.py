"""One line of the log every ten seconds while the engine is busy, and none while it is not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from mvllm.engine.metrics.stats import EngineLoad
from mvllm.logging import get_logger
from mvllm.messages.requests import SchedulerStats

logger = get_logger(__name__)

INTERVAL_SECONDS = 10.0


class PeriodicStatsLog:
    """Used in the thread of the loop.

    Args:
        load, stats: Ask the engine.
    """

    def __init__(self, load: Callable[[], EngineLoad], stats: Callable[[], SchedulerStats]) -> None:
        self._load = load
        self._stats = stats
        self._timer: asyncio.TimerHandle | None = None
        self._queries = self._hits = 0

    def schedule(self) -> None:
        """There is something to do: a line follows in ten seconds, if none is due already."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(INTERVAL_SECONDS, self._write)

    def close(self) -> None:
        """No line follows. Idempotent."""
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

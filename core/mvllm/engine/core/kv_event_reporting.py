"""Reports what an engine core's KV cache stores and removes: to subscribers over ZeroMQ, and to front ends that balance
requests over replicas."""

from __future__ import annotations

from mvllm.config.engine_config import EngineConfig
from mvllm.kv_cache.event_recorder import KVCacheEventRecorder
from mvllm.kv_cache.kv_cache_manager import KVCacheManager
from mvllm.logging import get_logger
from mvllm.messages.kv_events import CacheChanges

logger = get_logger(__name__)


class KVEventReporter:
    """Reports the events that the KV cache manager has recorded. Costs nothing where nobody asks for events.

    Args:
        config: The resolved configuration.
        kv_cache: The core's; it begins to record.

    Raises:
        ConfigError: An address of `kv_events` cannot be bound.
    """

    def __init__(self, config: EngineConfig, kv_cache: KVCacheManager) -> None:
        events = config.kv_events if config.kv_events is not None and config.kv_events.publishes else None
        if events is not None and not config.cache.enable_prefix_caching:
            logger.warning("No KV cache events are published: this model has no prefix cache on this platform.")
            events = None
        balances = config.parallel.data_parallel_size > 1 and config.cache.enable_prefix_caching
        self._recorder: KVCacheEventRecorder | None = None
        self._publisher = None
        if events is not None:
            from mvllm.kv_events.publisher import KVEventPublisher  # imports ZeroMQ, which a single process needs not

            self._publisher = KVEventPublisher(events, config.parallel.data_parallel_rank)
        if events is not None or balances:
            self._recorder = kv_cache.record_events(with_events=events is not None, with_changes=balances)

    def publish(self) -> None:
        """Publishes the events since the last call as one batch. Without events it does nothing."""
        if self._publisher is not None and self._recorder is not None:
            events = self._recorder.pop_events()
            if events:
                self._publisher.publish(events)

    def pop_changes(self) -> CacheChanges | None:
        """How the prefix cache has changed since the last call; None if it has not, or there is one replica."""
        return None if self._recorder is None else self._recorder.pop_changes()

    def close(self) -> None:
        """Ends the publication. Idempotent."""
        if self._publisher is not None:
            self._publisher.close()

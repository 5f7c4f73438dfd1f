"""Reports what an engine core's KV cache stores and removes: to subscribers over ZeroMQ, and to front ends that balance
requests over replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from mvllm.config.engine_config import EngineConfig
from mvllm.logging import get_logger
from mvllm.messages.kv_events import CacheChanges, KVCacheEvent

logger = get_logger(__name__)

STORE_SECONDS = 0.5
"""Changes of connectors' stores are published after this time if the engine has nothing else to do."""


class EventRecorder(Protocol):
    """What is needed of a KVCacheEventRecorder."""

    def pop_events(self) -> list[KVCacheEvent]:
        """The events since the last call."""

    def pop_changes(self) -> CacheChanges | None:
        """The changes since the last call."""


class StoreChanges(Protocol):
    """What is needed of KVLoads."""

    @property
    def reports_changes(self) -> bool:
        """Whether there may be changes while nothing else happens."""

    def record_changes(self) -> None:
        """Records the changes of connectors' stores as events."""


class KVEventReporter:
    """Reports the events that the KV cache manager has recorded. Costs nothing where nobody asks for events.

    Args:
        config: The resolved configuration.
        record_events: `KVCacheManager.record_events` of the core's KV cache.
        stores: The scheduler's KVLoads; None without a host tier.

    Raises:
        ConfigError: An address of `kv_events` cannot be bound.
    """

    def __init__(
        self,
        config: EngineConfig,
        record_events: Callable[..., EventRecorder],
        stores: StoreChanges | None = None,
    ) -> None:
        self._stores = stores
        events = config.kv_events if config.kv_events is not None and config.kv_events.publishes else None
        if events is not None and not config.cache.enable_prefix_caching:
            logger.warning("No KV cache events are published: this model has no prefix cache on this platform.")
            events = None
        balances = config.parallel.data_parallel_size > 1 and config.cache.enable_prefix_caching
        self._recorder: EventRecorder | None = None
        self._publisher = None
        if events is not None:
            from mvllm.kv_events.publisher import KVEventPublisher  # imports ZeroMQ, which a single process needs not

            self._publisher = KVEventPublisher(events, config.parallel.data_parallel_rank)
        if events is not None or balances:
            self._recorder = record_events(with_events=events is not None, with_changes=balances)

    def publish(self) -> None:
        """Publishes the events since the last call as one batch. Without events it does nothing."""
        if self._publisher is not None and self._recorder is not None:
            if self._stores is not None:
                self._stores.record_changes()
            events = self._recorder.pop_events()
            if events:
                self._publisher.publish(events)

    @property
    def report_seconds(self) -> float | None:
        """How often `publish` is to be called while nothing else happens; None for never."""
        return STORE_SECONDS if self._stores is not None and self._stores.reports_changes else None

    def pop_changes(self) -> CacheChanges | None:
        """How the prefix cache has changed since the last call; None if it has not, or there is one replica."""
        return None if self._recorder is None else self._recorder.pop_changes()

    def close(self) -> None:
        """Ends the publication. Idempotent."""
        if self._publisher is not None:
            self._publisher.close()

"""The properties that the clients of synchronous and asynchronous engines share."""

from __future__ import annotations

from typing import Protocol

from mvllm.config.engine_config import EngineConfig
from mvllm.engine.core.kv_cache_sizing import KVCacheSummary


class CoreClientProperties(Protocol):
    """The properties of an engine core that every client has."""

    @property
    def config(self) -> EngineConfig:
        """The configuration that the engine core runs with."""

    @property
    def platform_summary(self) -> str:
        """The platform's name and the plugin that provides it."""

    @property
    def cache_summary(self) -> KVCacheSummary:
        """The size of the KV cache."""

    @property
    def num_workers(self) -> int:
        """The number of workers; each may drive several devices."""

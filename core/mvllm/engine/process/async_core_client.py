"""What AsyncLLM needs of its engine core or cores, and how they are started."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from mvllm.config.engine_config import EngineConfig
from mvllm.engine.core.config_resolution import resolve_config
from mvllm.engine.core.kv_cache_sizing import KVCacheSummary
from mvllm.engine.process.async_mp_client import AsyncMPClient, OnDeath, OnOutputs, start_all
from mvllm.engine.process.dp_async_mp_client import start_replicas
from mvllm.engine.process.launched_core_connection import LaunchedCoreConnection
from mvllm.errors import ConfigError, EngineDeadError
from mvllm.messages.core_protocol import UtilityArg
from mvllm.messages.requests import EngineCoreRequest, SchedulerStats
from mvllm.platform.choose import ChosenPlatform


class AsyncEngineCoreClient(Protocol):
    """See AsyncMPClient for what the members do."""

    @property
    def config(self) -> EngineConfig:
        """The configuration it runs with."""

    @property
    def platform_summary(self) -> str:
        """The platform's name and the plugin it came from."""

    @property
    def cache_summary(self) -> KVCacheSummary:
        """The KV cache as it was sized."""

    @property
    def stats(self) -> SchedulerStats:
        """The scheduler's state as last told."""

    @property
    def heartbeat_age(self) -> float:
        """Seconds of silence of a core that has something to do."""

    @property
    def failure(self) -> EngineDeadError | None:
        """Why it can no longer be used."""

    @property
    def core_pids(self) -> list[int]:
        """Of the cores' processes."""

    def attach(self, loop: asyncio.AbstractEventLoop, on_outputs: OnOutputs, on_death: OnDeath) -> None:
        """Has news read in `loop`."""

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Queues the sequences of one request, which stay together."""

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Drops sequences."""

    async def call_utility(self, method: str, *args: UtilityArg) -> bool:
        """Calls a method of every core."""

    @property
    def num_other_sequences(self) -> int:
        """Sequences that other front ends have under way."""

    def on_sleep(self, callback: Callable[[bool], None]) -> None:
        """Has `callback` told when another front end puts the engine to sleep (True) or wakes it up."""

    async def broadcast_sleep(self, is_sleeping: bool) -> None:
        """Has all other front ends sleep or wake up; returns when they do."""

    def shutdown(self) -> None:
        """Ends the cores."""


def make_async_client(
    config: EngineConfig, chosen: ChosenPlatform, meanwhile: Callable[[EngineConfig], None] = lambda config: None
) -> AsyncEngineCoreClient:
    """Settles the configuration and starts as many engine cores as it says, each in a process of its own.

    They have one front end: the caller's process.

    Args:
        config: What was asked for.
        chosen: The platform.
        meanwhile: What this process has to do for its start.

    Raises:
        PlatformError, ConfigError, ModelError: The engine cannot be started as asked.
    """
    settled = resolve_server_config(config, chosen)
    if settled.parallel.data_parallel_size > 1:
        return start_replicas(settled, chosen, meanwhile)
    client = AsyncMPClient(settled, LaunchedCoreConnection("EngineCore", settled, chosen.source.name), str(chosen))
    start_all([client], lambda: meanwhile(settled))
    return client


def resolve_server_config(config: EngineConfig, chosen: ChosenPlatform) -> EngineConfig:
    """What the platform makes of a configuration whose engine cores have processes of their own.

    Raises:
        PlatformError, ConfigError, ModelError: The engine cannot be started as asked.
    """
    parallel = config.parallel
    if parallel.engine_core_process is False or parallel.distributed_executor_backend == "external_launcher":
        raise ConfigError(
            "A server's engine core runs in a process of its own: engine_core_process=False and "
            "distributed_executor_backend='external_launcher' are for offline use."
        )
    return resolve_config(config, chosen.platform)

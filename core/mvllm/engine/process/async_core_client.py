"""The interface between AsyncLLM and its engine cores (AsyncEngineCoreClient), and the function that starts them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from mvllm.config.engine_config import EngineConfig
from mvllm.engine.core.checkpoint_check import check_checkpoints
from mvllm.engine.core.config_resolution import resolve_config
from mvllm.engine.process.async_mp_client import AsyncMPClient, OnDeath, OnOutputs, OnSleep, start_all
from mvllm.engine.process.core_client_properties import CoreClientProperties
from mvllm.engine.process.dp_async_mp_client import start_replicas
from mvllm.engine.process.launched_core_connection import LaunchedCoreConnection
from mvllm.errors import ConfigError, EngineDeadError
from mvllm.messages.commands import EngineCommand
from mvllm.messages.requests import EngineCoreRequest, SchedulerStats
from mvllm.platform.choose import ChosenPlatform

R = TypeVar("R")


class AsyncEngineCoreClient(CoreClientProperties, Protocol):
    """Implemented by AsyncMPClient for one engine core and by DPLBAsyncMPClient for several."""

    @property
    def stats(self) -> SchedulerStats:
        """The last reported state of the scheduler."""

    @property
    def heartbeat_age(self) -> float:
        """Seconds since the last update of a core that has work; 0 without work."""

    @property
    def failure(self) -> EngineDeadError | None:
        """Why it can no longer be used."""

    @property
    def core_pids(self) -> list[int]:
        """The process ids of the cores."""

    def describe_cores(self) -> list[str]:
        """See `AsyncLLM.describe_cores`."""

    def attach(
        self,
        loop: asyncio.AbstractEventLoop,
        on_outputs: OnOutputs,
        on_death: OnDeath,
        on_sleep: OnSleep = lambda is_sleeping: None,
    ) -> None:
        """Starts to read updates in `loop`, the event loop of the calling thread.

        Args:
            on_outputs: Called with the outputs of each update, which may be empty but for the stats.
            on_death: Called once, when a core can no longer be used.
            on_sleep: Called for another front end's `sleep` (True) or `wake_up` (False).
        """

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Queues the sequences of one request, all on the same core."""

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Drops sequences; unknown ids are ignored."""

    async def call(self, command: EngineCommand[R]) -> R:
        """The answer of every core to a command, joined by the command.

        Raises:
            Exception: What a core raised, after all have answered.
        """

    @property
    def num_other_sequences(self) -> int:
        """Unfinished sequences of other front ends."""

    async def broadcast_sleep(self, is_sleeping: bool) -> None:
        """Sends `sleep` or `wake_up` to all other front ends; returns when they have applied it."""

    def shutdown(self) -> None:
        """Ends the cores."""


def make_async_client(
    config: EngineConfig, chosen: ChosenPlatform, during_start: Callable[[EngineConfig], None] = lambda config: None
) -> AsyncEngineCoreClient:
    """Resolves the configuration and starts `data_parallel_size` engine cores, each in a process of its own.

    The caller's process is their only front end.

    Args:
        config: The configuration as the user gave it.
        chosen: The platform.
        during_start: Called with the resolved configuration while the processes start.

    Raises:
        PlatformError, ConfigError, ModelError: The engine cannot be started as asked.
    """
    resolved = resolve_server_config(config, chosen)
    if resolved.parallel.data_parallel_size > 1:
        return start_replicas(resolved, chosen, during_start)
    client = AsyncMPClient(resolved, LaunchedCoreConnection("EngineCore", resolved, chosen.source.name), str(chosen))
    start_all([client], lambda: during_start(resolved))
    return client


def resolve_server_config(config: EngineConfig, chosen: ChosenPlatform) -> EngineConfig:
    """The resolved configuration of engine cores that run in processes of their own.

    Raises:
        PlatformError, ConfigError, ModelError: The engine cannot be started as asked.
    """
    parallel = config.parallel
    if parallel.engine_core_process is False or parallel.distributed_executor_backend == "external_launcher":
        raise ConfigError(
            "A server's engine core runs in a process of its own: engine_core_process=False and "
            "distributed_executor_backend='external_launcher' are for offline use. Leave them unset."
        )
    resolved = resolve_config(config, chosen.platform)
    check_checkpoints(resolved, chosen.platform)
    return resolved

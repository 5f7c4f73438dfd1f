"""How a front end reaches an engine core: as an object in its own process, or in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from mvllm.config.engine_config import EngineConfig, ParallelConfig
from mvllm.engine.core.config_resolution import resolve_config
from mvllm.engine.core.engine_core import EngineCore
from mvllm.engine.core.kv_cache_sizing import KVCacheSummary
from mvllm.engine.core.worker_environment import worker_environment
from mvllm.errors import ConfigError
from mvllm.messages.lora import LoRARequest
from mvllm.messages.requests import EngineCoreOutputs, EngineCoreRequest
from mvllm.platform.choose import ChosenPlatform, choose_platform

if TYPE_CHECKING:
    from mvllm.engine.process.sync_mp_client import SyncMPClient


class InprocClient:
    """Calls the engine core directly.

    Attributes:
        config: The configuration the engine runs with, after the platform's plan.
        platform_summary: The platform's name and the plugin it came from.
    """

    def __init__(self, core: EngineCore, platform_summary: str) -> None:
        self._core = core
        self.config = core.config
        self.platform_summary = platform_summary

    @property
    def cache_summary(self) -> KVCacheSummary:
        """The KV cache as it was sized."""
        return self._core.cache_summary

    @property
    def start_seconds(self) -> dict[str, float]:
        """Seconds per start-up phase."""
        return self._core.start_seconds

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queues a validated request."""
        self._core.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Drops requests; unknown ids are ignored."""
        self._core.abort_requests(request_ids)

    def has_requests(self) -> bool:
        """Whether `step` has work."""
        return self._core.has_requests()

    def step(self) -> EngineCoreOutputs:
        """Runs one step."""
        return self._core.step()

    def interrupt_step(self) -> None:
        """Nothing: `step` does not wait for anybody."""

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes."""
        return self._core.reset_prefix_cache()

    def sleep(self, level: int) -> None:
        """Gives memory back; see `EngineCore.sleep`."""
        self._core.sleep(level)

    def wake_up(self, tags: Sequence[str]) -> bool:
        """Claims it again; see `EngineCore.wake_up`."""
        return self._core.wake_up(tags)

    def add_lora(self, request: LoRARequest) -> None:
        """Loads an adapter; see `EngineCore.add_lora`."""
        self._core.add_lora(request)

    def remove_lora(self, lora_int_id: int) -> bool:
        """Forgets it; see `EngineCore.remove_lora`."""
        return self._core.remove_lora(lora_int_id)

    def check_health(self) -> None:
        """Raises unless every worker answers."""
        self._core.check_health()

    def shutdown(self) -> None:
        """Ends the engine. Idempotent."""
        self._core.shutdown()


def make_client(
    config: EngineConfig,
    chosen: ChosenPlatform | None = None,
    meanwhile: Callable[[EngineConfig], None] = lambda config: None,
) -> InprocClient | SyncMPClient:
    """Chooses the platform, settles the configuration with it, and starts an engine core.

    Args:
        config: What was asked for.
        chosen: The platform, where it has been chosen before.
        meanwhile: What this process has to do for its start, called with the settled configuration: beside an engine
            core that starts in a process of its own, and before one in this process. What it raises ends the start.

    Raises:
        PlatformError, ConfigError, ModelError: The engine cannot be started as asked.
    """
    chosen = chosen or choose_platform(config.platform)
    if config.parallel.data_parallel_size > 1:
        raise ConfigError(
            f"data_parallel_size is {config.parallel.data_parallel_size}, but offline there is one engine: replicas "
            "are for a server. Set it to 1, or start several processes."
        )
    settled = resolve_config(config, chosen.platform)
    if _wants_own_process(settled.parallel):
        from mvllm.engine.process.sync_mp_client import SyncMPClient  # and with it ZeroMQ, which no other path needs

        return SyncMPClient(settled, chosen, meanwhile)
    with worker_environment(settled.parallel, chosen.platform):
        meanwhile(settled)
        core = EngineCore(settled, chosen.platform)
    return InprocClient(core, str(chosen))


def _wants_own_process(parallel: ParallelConfig) -> bool:
    """Whether the engine core gets a process of its own; unless asked for, it does not."""
    if parallel.engine_core_process and parallel.distributed_executor_backend == "external_launcher":
        raise ConfigError(
            "engine_core_process cannot be had with distributed_executor_backend 'external_launcher': the launcher "
            "gives and watches one process per rank. Leave engine_core_process unset."
        )
    return bool(parallel.engine_core_process)

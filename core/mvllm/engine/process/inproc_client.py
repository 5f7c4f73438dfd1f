"""The client of an engine core in the same process, and `make_client`, which chooses between it and SyncMPClient."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mvllm.config.engine_config import EngineConfig, ParallelConfig
from mvllm.engine.core.checkpoint_check import check_checkpoints
from mvllm.engine.core.config_resolution import resolve_config
from mvllm.engine.core.engine_core import EngineCore
from mvllm.engine.core.worker_environment import worker_environment
from mvllm.errors import ConfigError
from mvllm.platform.choose import ChosenPlatform, choose_platform

if TYPE_CHECKING:
    from mvllm.engine.process.sync_mp_client import SyncMPClient


class InprocClient:
    """The client of an engine core in the same process: its methods are the core's own.

    Attributes:
        config: The configuration the engine runs with, after the platform's plan.
        platform_summary: The platform's name and the plugin it came from.
        has_local_worker: The worker runs in this process.
        runs_functions: Requests may have functions as logits processors: the model runs in this process, too.
        cache_summary, num_workers, start_seconds, add_request, abort_requests, has_requests, step, call,
        collective_rpc, apply_model, shutdown: The EngineCore's.
    """

    def __init__(self, core: EngineCore, platform_summary: str, *, runs_functions: bool = False) -> None:
        self._core = core
        self.runs_functions = runs_functions
        self.has_local_worker = core.has_local_worker
        self.config = core.config
        self.platform_summary = platform_summary
        self.cache_summary = core.cache_summary
        self.num_workers = core.num_workers
        self.start_seconds = core.start_seconds
        self.add_request = core.add_request
        self.abort_requests = core.abort_requests
        self.has_requests = core.has_requests
        self.step = core.step
        self.call = core.call
        self.collective_rpc = core.collective_rpc
        self.apply_model = core.apply_model
        self.shutdown = core.shutdown

    def interrupt_step(self) -> None:
        """Does nothing: `step` does not wait for another process."""


def make_client(
    config: EngineConfig,
    chosen: ChosenPlatform | None = None,
    during_start: Callable[[EngineConfig], None] = lambda config: None,
) -> InprocClient | SyncMPClient:
    """Chooses the platform, resolves the configuration with it, and starts an engine core.

    Args:
        config: The configuration as the user gave it.
        chosen: The platform, if it has been chosen already.
        during_start: Called with the resolved configuration while an engine core process starts, or before an engine
            core in this process is constructed. An exception of it ends the start.

    Raises:
        PlatformError, ConfigError, ModelError: The engine cannot be started as asked.
    """
    chosen = chosen or choose_platform(config.platform)
    if config.parallel.data_parallel_size > 1:
        raise ConfigError(
            f"data_parallel_size is {config.parallel.data_parallel_size}, but offline there is one engine: replicas "
            "are for a server. Set it to 1, or start several processes."
        )
    resolved = resolve_config(config, chosen.platform)
    check_checkpoints(resolved, chosen.platform)
    if _uses_core_process(resolved.parallel):
        from mvllm.engine.process.sync_mp_client import SyncMPClient  # imports ZeroMQ, which no other path needs

        return SyncMPClient(resolved, chosen, during_start)
    with worker_environment(resolved.parallel, chosen.platform):
        during_start(resolved)
        core = EngineCore(resolved, chosen.platform)
    runs_functions = core.has_local_worker and chosen.platform.capabilities.torch_device
    return InprocClient(core, str(chosen), runs_functions=runs_functions)


def _uses_core_process(parallel: ParallelConfig) -> bool:
    """Whether the engine core runs in a process of its own: only if `engine_core_process` is set."""
    if parallel.engine_core_process and parallel.distributed_executor_backend == "external_launcher":
        raise ConfigError(
            "engine_core_process is set, but distributed_executor_backend 'external_launcher' starts and watches one "
            "process per rank. Leave engine_core_process unset."
        )
    return bool(parallel.engine_core_process)

"""Holds one worker: builds the class that the platform names, and lets in only what WorkerProtocol declares."""

from __future__ import annotations

from typing import Any

from mvllm.config.engine_config import EngineConfig
from mvllm.errors import ConfigError, PlatformError
from mvllm.messages.scheduler_output import ModelRunnerOutput, SchedulerOutput
from mvllm.platform.discovery import load_attribute
from mvllm.platform.interface import Platform
from mvllm.platform.phases import Phase, enter_phase
from mvllm.platform.topology import WorkerContext
from mvllm.platform.worker_protocol import WorkerProtocol

_METHODS = frozenset(name for name in vars(WorkerProtocol) if not name.startswith("_"))
_OPTIONAL = frozenset({"collect_output"})


class WorkerWrapper:
    """One worker and its life cycle.

    Args:
        config: The engine's configuration.
        platform: The platform; its `worker_class` decides the class, core's Worker by default.
        ctx: Which worker this is.
    """

    def __init__(self, config: EngineConfig, platform: Platform, ctx: WorkerContext) -> None:
        with enter_phase(Phase.WORKER):
            path = platform.worker_class() or "mvllm.worker.worker:Worker"
            worker = load_attribute(path)(config, platform, ctx)
        missing = sorted(name for name in _METHODS - _OPTIONAL if not callable(getattr(worker, name, None)))
        if missing:
            raise PlatformError(
                f"{path}, the worker class of platform {platform.spec.name!r}, lacks methods of WorkerProtocol: "
                f"{', '.join(missing)}."
            )
        self._worker: WorkerProtocol = worker
        self._open = True

    def call(self, method: str, *args: Any) -> Any:
        """Calls a declared method of the worker.

        Raises:
            ConfigError: WorkerProtocol declares no such method.
        """
        if method not in _METHODS:
            raise ConfigError(f"collective_rpc({method!r}): workers offer {', '.join(sorted(_METHODS))}.")
        with enter_phase(Phase.WORKER):
            return getattr(self._worker, method)(*args)

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Runs one step."""
        with enter_phase(Phase.WORKER):
            return self._worker.execute_model(plan)

    def shutdown(self) -> None:
        """Releases the worker. Idempotent."""
        if self._open:
            self._open = False
            with enter_phase(Phase.WORKER):
                self._worker.shutdown()

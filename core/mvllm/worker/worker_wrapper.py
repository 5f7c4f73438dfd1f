"""Builds the platform's worker class, and calls only the methods that WorkerProtocol declares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mvllm.config.engine_config import EngineConfig
from mvllm.errors import ConfigError, MvllmError, PlatformError, UnsupportedMethodError
from mvllm.logging import get_logger
from mvllm.messages.scheduler_output import ModelRunnerOutput, SchedulerOutput
from mvllm.platform.discovery import load_attribute
from mvllm.platform.interface import Platform
from mvllm.platform.phases import Phase, enter_phase
from mvllm.platform.topology import WorkerContext
from mvllm.platform.worker_class import worker_class_of
from mvllm.platform.worker_protocol import OPTIONAL_METHODS, WORKER_METHODS, WorkerProtocol, defined_together

logger = get_logger(__name__)

_METHODS_OF_MODELS = frozenset(("decode_images",))
"""Methods of WorkerProtocol that core's worker leaves to its model."""


class WorkerWrapper:
    """Creates, calls and shuts down one worker.

    Args:
        config: The engine's configuration.
        platform: The platform; decides the class, see `worker_class_of`.
        ctx: The worker's ranks and device.
    """

    def __init__(self, config: EngineConfig, platform: Platform, ctx: WorkerContext) -> None:
        with enter_phase(Phase.WORKER):
            path = worker_class_of(platform)
            if platform.spec.torch_backend is not None:  # others need not have torch
                from mvllm.worker.torch_backend import check_torch_backend

                check_torch_backend(platform)  # before importing the worker class, which may load the backend's library
            extension = config.parallel.worker_extension_cls
            worker = _build(path, platform, config, ctx, extension)
        self._extension = extension
        missing = sorted(
            name for name in WORKER_METHODS - OPTIONAL_METHODS if not callable(getattr(worker, name, None))
        )
        if missing:
            raise PlatformError(
                f"{path}, the worker class of platform {platform.spec.name!r}, lacks methods of WorkerProtocol: "
                f"{', '.join(missing)}."
            )
        self._worker: WorkerProtocol = worker
        self._name = f"The worker of rank {ctx.rank} on platform {platform.spec.name!r}"
        self._open = True

    def call(self, method: str, *args: Any) -> Any:
        """Calls a declared method of the worker.

        Raises:
            ConfigError: WorkerProtocol declares no such method.
            PlatformError: The worker raised an exception other than MvllmError, which becomes the `__cause__`.
        """
        if method == "can_sample_later":
            return self.can_sample_later
        if method == "call_extension":
            return self._call_extension(*args)
        if method not in WORKER_METHODS:
            raise ConfigError(self._no_method(method))
        if method == "call_model" and not hasattr(self._worker, method) and args[0] in _METHODS_OF_MODELS:
            method, args = args  # a worker class may have the method itself, without a model of core
        if method in OPTIONAL_METHODS and not hasattr(self._worker, method):
            raise UnsupportedMethodError(f"{self._name} does not implement the optional method {method!r}.")
        return self._run(method, args, {})

    def _call_extension(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self._extension is None or method.startswith("_") or method not in extension_methods(self._extension):
            raise ConfigError(self._no_method(method))
        return self._run(method, args, kwargs)

    def _no_method(self, method: str) -> str:
        where = f", nor has {self._extension}" if self._extension else ""
        more = "" if self._extension else " The setting worker_extension_cls adds methods."
        return f"collective_rpc: workers have no method {method!r}{where}.{more}"

    def _run(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        try:
            with enter_phase(Phase.WORKER):
                return getattr(self._worker, method)(*args, **kwargs)
        except (MvllmError, KeyboardInterrupt):
            raise
        except BaseException as e:  # a plugin or the user's code may raise anything, SystemExit included
            raise PlatformError(f"{self._name} failed in {method}: {type(e).__name__}: {e}") from e

    @property
    def model(self) -> Any:
        """The worker's model.

        Raises:
            PlatformError: The worker class has no method `get_model`.
        """
        if not hasattr(self._worker, "get_model"):
            raise PlatformError(f"{self._name} gives no access to its model: it does not implement 'get_model'.")
        return self._worker.get_model()

    @property
    def can_sample_later(self) -> bool:
        """Whether a plan may set `masks_follow`: one class defines both `execute_model` and `sample_tokens`."""
        return defined_together(type(self._worker), "execute_model", "sample_tokens")

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        """Runs one step; None if `sample_tokens` or `collect_output` returns its output."""
        try:
            with enter_phase(Phase.WORKER):
                return self._worker.execute_model(plan)
        except SystemExit as e:
            raise self._ended_the_process(e) from e

    def sample_tokens(self, step: int, mask_rows: list[int], token_masks: bytes) -> ModelRunnerOutput | None:
        """Samples a step whose plan set `masks_follow`; None if `collect_output` returns its output."""
        try:
            with enter_phase(Phase.WORKER):
                return self._worker.sample_tokens(step, mask_rows, token_masks)
        except SystemExit as e:
            raise self._ended_the_process(e) from e

    def _ended_the_process(self, error: SystemExit) -> PlatformError:
        return PlatformError(f"{self._name} tried to end the process: SystemExit: {error}")

    def shutdown(self) -> None:
        """Releases the worker. Idempotent. Errors are logged: there is no way to handle them."""
        if not self._open:
            return
        self._open = False
        try:
            with enter_phase(Phase.WORKER):
                self._worker.shutdown()
        except KeyboardInterrupt:
            raise
        except BaseException as e:  # noqa: BLE001  (a plugin may raise anything, SystemExit included)
            logger.warning("%s failed in shutdown: %s: %s", self._name, type(e).__name__, e)


def _load_class(path: str) -> Any:
    """The object that `module:name` or `module.name` names."""
    module, _, name = path.rpartition(".")
    return load_attribute(path if ":" in path else f"{module}:{name}")


def extension_methods(path: str) -> frozenset[str]:
    """The public methods of the class that `worker_extension_cls` names."""
    extension = _load_class(path)
    return frozenset(name for name in dir(extension) if not name.startswith("_") and callable(getattr(extension, name)))


def _build(path: str, platform: Platform, config: EngineConfig, ctx: WorkerContext, extension: str | None) -> Any:
    try:
        worker_class = load_attribute(path)
        if extension is not None:
            worker_class = _extended(worker_class, extension)
        return worker_class(config, platform, ctx)
    except (MvllmError, KeyboardInterrupt):
        raise
    except BaseException as e:
        raise PlatformError(
            f"{path}, the worker class of platform {platform.spec.name!r}, cannot be loaded and built: "
            f"{type(e).__name__}: {e}"
        ) from e


def _extended(worker_class: type, path: str) -> type:
    """The worker class with the methods of a user's class.

    Raises:
        ConfigError: The class cannot be loaded, is none, or redefines a method of the worker.
    """
    try:
        extension = _load_class(path)
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError(f"worker_extension_cls={path!r} cannot be loaded: {type(e).__name__}: {e}") from e
    if not isinstance(extension, type):
        raise ConfigError(f"worker_extension_cls={path!r} must name a class, found {extension!r:.80}.")
    repeated = sorted(
        name
        for name in dir(extension)
        if not name.startswith("__") and (hasattr(worker_class, name) or name in WORKER_METHODS)
    )
    if repeated:
        raise ConfigError(
            f"worker_extension_cls={path!r} defines {', '.join(repeated)}, which the worker has already. Choose other "
            "names."
        )
    return type(worker_class.__name__, (worker_class, extension), {})

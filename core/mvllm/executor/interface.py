"""The interface of executors: how one engine core calls its workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, Literal, TypeVar, overload

from mvllm.config.engine_config import EngineConfig
from mvllm.errors import ConfigError
from mvllm.logging import get_logger
from mvllm.messages.scheduler_output import ModelRunnerOutput, SchedulerOutput
from mvllm.platform.interface import Platform
from mvllm.platform.topology import LaunchTopology
from mvllm.platform.worker_protocol import KVCacheNeeds

logger = get_logger(__name__)

_T = TypeVar("_T")


def log_drawn_seed(seed: int) -> None:
    """Logs the seed of an engine that was given none, so that its samples can be reproduced."""
    logger.info("seed = %d: drawn at this start, because none was given. Set this seed to reproduce the samples.", seed)


class Executor(ABC):
    """Runs WorkerProtocol methods on every worker of one engine.

    Used from the engine core's thread only. A worker's error is raised where its result is requested.

    Args:
        config: The engine's configuration.
        platform: The platform of its workers.
    """

    needs_platform_support: ClassVar[bool] = False
    """Whether the executor, if it is named by its entry point, runs only on platforms that list that name in
    `LaunchTopology.executors`."""

    has_local_worker: ClassVar[bool] = False
    """Whether the only worker runs in this process, so that functions can be passed to it."""

    @classmethod
    def is_preferred(cls, topology: LaunchTopology, count_devices: Callable[[], int | None], *, platform: str) -> bool:
        """Whether this executor should run an engine of several workers for which the user named no executor.

        Called on installed executors that the platform lists in `LaunchTopology.executors`, in the order of that list.
        It must not import slow libraries.

        Args:
            topology: The number of workers and of devices per worker.
            count_devices: Counts the devices of this machine; None where the platform does not list them.
            platform: The platform's name.
        """
        return False

    def __init__(self, config: EngineConfig, platform: Platform) -> None:
        self._config = config
        self._platform = platform

    @property
    def config(self) -> EngineConfig:
        """The configuration of its workers: the engine's, with the values that several engines agreed on."""
        return self._config

    @overload
    def collective_rpc(
        self,
        method: str,
        args: tuple[Any, ...] = (),
        *,
        timeout: float | None = None,
        ranks: Sequence[int] | None = None,
        non_block: Literal[False] = False,
    ) -> list[Any]: ...

    @overload
    def collective_rpc(
        self,
        method: str,
        args: tuple[Any, ...] = (),
        *,
        timeout: float | None = None,
        ranks: Sequence[int] | None = None,
        non_block: Literal[True],
    ) -> Future[list[Any]]: ...

    @abstractmethod
    def collective_rpc(
        self,
        method: str,
        args: tuple[Any, ...] = (),
        *,
        timeout: float | None = None,
        ranks: Sequence[int] | None = None,
        non_block: bool = False,
    ) -> list[Any] | Future[list[Any]]:
        """Calls a WorkerProtocol method on all workers, or on `ranks`.

        Args:
            method: Name of a method that WorkerProtocol declares.
            args: Its arguments.
            timeout: Seconds to wait for all results, or None for the default limit of the executor.
            ranks: Workers to call, or None for all.
            non_block: Return a future instead of waiting.

        Returns:
            The results in rank order.
        """

    def apply_model(self, function: Callable[[Any], _T]) -> list[_T]:
        """Calls a function with the model of every worker, which must run in this process.

        Args:
            function: Takes the model, a `torch.nn.Module` with mvllm's layers.

        Returns:
            The results in rank order.

        Raises:
            ConfigError: A worker runs in another process.
        """
        raise ConfigError(
            "apply_model needs its worker in this process, because functions are not sent to other processes. Run one "
            "worker (tensor_parallel_size=1, pipeline_parallel_size=1)."
        )

    @abstractmethod
    def execute_model(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Starts one step. Steps run in the order of the calls; the result comes from one rank."""

    def can_sample_later(self) -> bool:
        """Whether plans may set `masks_follow`, followed by `sample_tokens`. Called after the model is loaded."""
        return False

    def sample_tokens(self, step: int, mask_rows: list[int], token_masks: bytes) -> None:
        """Samples the last started step, whose plan set `masks_follow`.

        Errors are raised by the step's future. Only called where `can_sample_later` is true.

        Args:
            step: The number of the step.
            mask_rows, token_masks: As in SchedulerOutput.
        """
        raise NotImplementedError

    @abstractmethod
    def shutdown(self) -> None:
        """Terminates all workers. Idempotent."""

    def on_failure(self, callback: Callable[[Exception], None]) -> None:
        """Registers `callback`, which is called once, from any thread, when the workers can no longer be used.

        If that has happened, it is called at once. Executors whose workers cannot fail by themselves never call it.
        """

    def start(self) -> None:
        """Initializes the device and loads the model on every worker."""
        self.collective_rpc("init_device")
        self.collective_rpc("load_model")

    def kv_cache_needs(self) -> list[KVCacheNeeds]:
        """The KV-cache requirements of each worker, in rank order."""
        return self.collective_rpc("kv_cache_needs")

    def available_kv_bytes(self) -> list[int]:
        """The bytes that a profiling step leaves for the KV cache on each worker, in rank order."""
        return self.collective_rpc("available_kv_bytes")

    def allocate_kv_cache(self, num_blocks: int, block_size: int, num_state_slots: int = 0) -> None:
        """Allocates the KV cache on every worker, then warms the workers up.

        Args:
            num_state_slots: Slots for sequence states; 0 for models without them.
        """
        if num_state_slots:
            self.collective_rpc("allocate_states", (num_state_slots,))
        self.collective_rpc("allocate_kv_cache", (num_blocks, block_size))
        self.collective_rpc("warm_up")

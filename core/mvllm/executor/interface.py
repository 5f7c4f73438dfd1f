"""Executors: how one engine core reaches its workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, Literal, overload

from mvllm.config.engine_config import EngineConfig
from mvllm.logging import get_logger
from mvllm.messages.scheduler_output import ModelRunnerOutput, SchedulerOutput
from mvllm.platform.interface import Platform
from mvllm.platform.topology import LaunchTopology
from mvllm.platform.worker_protocol import KVCacheNeeds

logger = get_logger(__name__)


def log_drawn_seed(seed: int) -> None:
    """Logs the seed of an engine that was given none, so that its samples can be had again."""
    logger.info("seed = %d: drawn at this start, as none was given. With this seed, samples are the same again.", seed)


class Executor(ABC):
    """Runs WorkerProtocol methods on every worker of one engine.

    Used from one thread, the engine core's. A worker's error is raised where its result is asked for.

    Args:
        config: The engine's configuration.
        platform: Where its workers run.
    """

    needs_platform_support: ClassVar[bool] = False
    """Whether an executor that is named by its entry point runs only on platforms that list the name in
    `LaunchTopology.executors`."""

    @classmethod
    def is_preferred(cls, topology: LaunchTopology, count_devices: Callable[[], int | None]) -> bool:
        """Whether this executor should run an engine of several workers for which none was named.

        Asked of installed executors that the platform lists in `LaunchTopology.executors`, in the order of that list.
        The answer must not need anything to be imported that starts slowly.

        Args:
            topology: How many workers, of how many devices each.
            count_devices: Counts the devices of this machine; None where the platform does not list them.
        """
        return False

    def __init__(self, config: EngineConfig, platform: Platform) -> None:
        self._config = config
        self._platform = platform

    @property
    def config(self) -> EngineConfig:
        """The configuration that its workers have: the engine's, with what several engines had to agree on."""
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
            method: Name of a declared method; anything else is refused.
            args: Its arguments.
            timeout: Seconds to wait for all answers, or None for no limit.
            ranks: Workers to call, or None for all.
            non_block: Return a future instead of waiting.

        Returns:
            The answers in rank order.
        """

    @abstractmethod
    def execute_model(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Starts one step. Steps run in the order of the calls; the result comes from one rank."""

    def can_sample_later(self) -> bool:
        """Whether plans may say `masks_follow`, with `sample_tokens` behind them. Asked when the model is loaded."""
        return False

    def sample_tokens(self, step: int, mask_rows: list[int], token_masks: bytes) -> None:
        """Has the step that was started last, and whose plan said `masks_follow`, sampled.

        Errors are raised by the step's own future. Only where `can_sample_later`.

        Args:
            step: Of the plan.
            mask_rows, token_masks: As in the plan.
        """
        raise NotImplementedError

    @abstractmethod
    def shutdown(self) -> None:
        """Ends all workers. Idempotent."""

    def on_failure(self, callback: Callable[[Exception], None]) -> None:
        """Has `callback` called, once and from any thread, when the workers can no longer be used.

        A failure that has happened is reported at once. Workers that cannot fail by themselves never call it.
        """

    def start(self) -> None:
        """Brings every worker up to a loaded model."""
        self.collective_rpc("init_device")
        self.collective_rpc("load_model")

    def kv_cache_needs(self) -> list[KVCacheNeeds]:
        """Each worker's cost of KV cache, in rank order."""
        return self.collective_rpc("kv_cache_needs")

    def available_kv_bytes(self) -> list[int]:
        """What a profiling step leaves on each worker, in rank order."""
        return self.collective_rpc("available_kv_bytes")

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> None:
        """Claims the KV cache on every worker, then lets them warm up."""
        self.collective_rpc("allocate_kv_cache", (num_blocks, block_size))
        self.collective_rpc("warm_up")

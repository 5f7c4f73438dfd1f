"""Sleep mode of an engine core: releases the workers' memory, and allocates it again. Levels and tags: `sleep.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from mvllm.engine.core.answers import answers
from mvllm.engine.core.block_saves import BlockSaves
from mvllm.engine.core.kv_event_reporting import KVEventReporter
from mvllm.engine.core.lora_manager import LoRAManager
from mvllm.engine.core.sleep import KV_CACHE, TAGS, WEIGHTS, ReleasedMemory, check_sleep_level
from mvllm.engine.core.step_pipeline import StepPipeline
from mvllm.engine.core.weight_commands import WeightCommands
from mvllm.engine.core.weight_updates import WeightUpdateManager
from mvllm.errors import ModelError, RequestError, UnsupportedMethodError
from mvllm.executor.interface import Executor
from mvllm.messages.commands import CheckSleep, Sleep, WakeUp
from mvllm.scheduler.scheduler import Scheduler


class SleepMode:
    """Puts the workers to sleep and wakes them up.

    Args:
        executor: Calls the workers.
        memory: What sleeps; changed here only.
        offloads_weights: Whether level 1 moves the weights to host memory, see `Capabilities.offloads_weights`.
        weight_updates, weights: No update may be open; weights that were read again are usable.
        lora_manager: Its adapters are dropped with the weights; None without LoRA.
        scheduler, steps, saves, kv_events: Those of the engine core.
        fail_all_requests: Ends all requests with an error.
    """

    def __init__(
        self,
        executor: Executor,
        memory: ReleasedMemory,
        *,
        offloads_weights: bool,
        weight_updates: WeightUpdateManager,
        weights: WeightCommands,
        lora_manager: LoRAManager | None,
        scheduler: Scheduler,
        steps: StepPipeline,
        saves: BlockSaves,
        kv_events: KVEventReporter,
        fail_all_requests: Callable[[str], None],
    ) -> None:
        self._executor = executor
        self._memory = memory
        self._offloads_weights = offloads_weights
        self._weight_updates = weight_updates
        self._weights = weights
        self._lora_manager = lora_manager
        self._scheduler = scheduler
        self._steps = steps
        self._saves = saves
        self._kv_events = kv_events
        self._fail_all_requests = fail_all_requests
        self._dropped_weights = False  # they sleep at level 2

    @answers(CheckSleep)
    def check(self, level: int) -> None:
        """Checks what can be checked before `sleep` ends requests. Changes nothing.

        Raises:
            RequestError: `level` is neither 1 nor 2, a weight update is under way, or a host lacks memory for weights.
        """
        self._check_level(level)
        if self._offloads_weights:
            self._steps.collect_all()
            with contextlib.suppress(UnsupportedMethodError):
                self._executor.collective_rpc("check_sleep", (level,))

    @answers(Sleep)
    def sleep(self, level: int) -> None:
        """Releases memory on all workers: the KV cache, and the weights, which level 1 copies to the host, see `sleep`.

        Unfinished requests end with an error. New ones are refused until `wake_up` has restored everything.

        Raises:
            RequestError: `level` is neither 1 nor 2, or a weight update is under way.
            PlatformError: A worker does not support it; the engine stays awake.
            ModelError: A host lacks memory for weights; the engine is awake, without requests and prefix cache.
            EngineDeadError: The step in flight failed.
        """
        drops_weights = self._check_level(level) == 2
        self._steps.collect_all()
        self._fail_all_requests("The engine was put to sleep.")
        self._saves.save_all()
        freed = self._scheduler.reset_prefix_cache(keeps_tiers=True)
        self._kv_events.publish()
        assert freed, "blocks without a request"
        before = self._memory.tags
        if drops_weights or self._offloads_weights:
            self._memory.tags = TAGS
        else:
            self._memory.tags = tuple(tag for tag in TAGS if tag == KV_CACHE or tag in before)
        try:
            self._executor.collective_rpc("sleep", (level,))
        except UnsupportedMethodError:
            self._memory.tags = before
            raise
        except ModelError:  # some workers sleep
            self.wake_up()
            raise
        if drops_weights:
            self._dropped_weights = True
            if self._lora_manager is not None:
                self._lora_manager.clear()

    @answers(WakeUp)
    def wake_up(self, tags: Sequence[str] = ()) -> bool:
        """Allocates released memory again. Returns whether nothing sleeps any more, so that requests are accepted.

        Raises:
            RequestError: `kv_cache` alone, while the weights sleep.
            CacheError, ModelError: Not enough memory, or the checkpoint is gone. The call may be repeated.
        """
        memory = self._memory
        wanted = [tag for tag in memory.tags if not tags or tag in tags]
        if WEIGHTS in memory.tags and wanted == [KV_CACHE]:
            raise RequestError(
                "kv_cache cannot be woken up while the weights sleep. Wake up weights first, or both together.",
                parameter="tags",
            )
        if wanted:
            self._executor.collective_rpc("wake_up", (wanted,))
            if KV_CACHE in wanted:
                self._executor.collective_rpc("warm_up")
            memory.tags = tuple(tag for tag in memory.tags if tag not in wanted)
            if WEIGHTS in wanted and self._dropped_weights:
                self._dropped_weights = False
                self._weights.reloaded()
        return not memory.tags

    def _check_level(self, level: int) -> int:
        check_sleep_level(level)
        if self._weight_updates.is_open:
            raise RequestError("A weight update is under way. Finish it before putting the engine to sleep.")
        return level

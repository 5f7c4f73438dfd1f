"""Sleep mode of EngineCore: releases the workers' memory, and allocates it again. Levels and tags: `sleep.py`."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mvllm.engine.core.adapters import CoreAdapters
from mvllm.engine.core.sleep import KV_CACHE, TAGS, WEIGHTS, check_sleep_level
from mvllm.errors import ModelError, RequestError, UnsupportedMethodError

if TYPE_CHECKING:
    from mvllm.engine.core.kv_event_reporting import KVEventReporter


class CoreSleep(CoreAdapters):
    """Base of EngineCore."""

    _kv_events: KVEventReporter
    _offloads_weights: bool
    _dropped_weights = False  # they sleep at level 2

    @abstractmethod
    def _save_blocks(self) -> None:
        """Saves what is left to be saved to host blocks."""

    def check_sleep(self, level: int) -> None:
        """Checks what can be checked before `sleep` aborts requests. Changes nothing.

        Raises:
            RequestError: `level` is neither 1 nor 2, a weight update is under way, or a host lacks memory for weights.
        """
        check_sleep_level(level)
        if self._weights.is_open:
            raise RequestError("A weight update is under way. Finish it before putting the engine to sleep.")
        if self._offloads_weights:
            self._collect_all_steps()
            with contextlib.suppress(UnsupportedMethodError):
                self._executor.collective_rpc("check_sleep", (level,))

    def sleep(self, level: int) -> None:
        """Releases memory on all workers: the KV cache, and the weights, which level 1 copies to the host, see `sleep`.

        Unfinished requests end with an error. New ones are refused until `wake_up` has restored everything.

        Raises:
            RequestError: `level` is neither 1 nor 2, or a weight update is under way.
            PlatformError: A worker does not support it; the engine stays awake.
            ModelError: A host lacks memory for weights; the engine is awake, without requests and prefix cache.
            EngineDeadError: The step in flight failed.
        """
        drops_weights = check_sleep_level(level) == 2
        if self._weights.is_open:
            raise RequestError("A weight update is under way. Finish it before putting the engine to sleep.")
        self._collect_all_steps()
        self._fail_all_requests("The engine was put to sleep.")
        self._save_blocks()
        freed = self.scheduler.reset_prefix_cache(keeps_tiers=True)
        self._kv_events.publish()
        assert freed, "blocks without a request"
        before = self._released_memory
        if drops_weights or self._offloads_weights:
            self._released_memory = TAGS
        else:
            self._released_memory = tuple(tag for tag in TAGS if tag == KV_CACHE or tag in before)
        try:
            self._executor.collective_rpc("sleep", (level,))
        except UnsupportedMethodError:
            self._released_memory = before
            raise
        except ModelError:  # some workers sleep
            self.wake_up()
            raise
        if drops_weights:
            self._dropped_weights = True
            if self._lora_manager is not None:
                self._lora_manager.clear()

    def wake_up(self, tags: Sequence[str] = ()) -> bool:
        """Allocates released memory again.

        Args:
            tags: `weights`, `kv_cache` or both; empty for everything that sleeps.

        Returns:
            Whether nothing sleeps any more, so that requests are accepted.

        Raises:
            RequestError: `kv_cache` alone, while the weights sleep.
            CacheError, ModelError: Not enough memory, or the checkpoint is gone. The call may be repeated.
        """
        wanted = [tag for tag in self._released_memory if not tags or tag in tags]
        if WEIGHTS in self._released_memory and wanted == [KV_CACHE]:
            raise RequestError(
                "kv_cache cannot be woken up while the weights sleep. Wake up weights first, or both together.",
                parameter="tags",
            )
        if wanted:
            self._executor.collective_rpc("wake_up", (wanted,))
            if KV_CACHE in wanted:
                self._executor.collective_rpc("warm_up")
            self._released_memory = tuple(tag for tag in self._released_memory if tag not in wanted)
            if WEIGHTS in wanted and self._dropped_weights:
                self._dropped_weights = False
                self._weights_reloaded()
        return not self._released_memory

"""The part of AsyncLLM that puts the engine to sleep and wakes it up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from mvllm.engine.core.sleep import check_sleep_level, check_wake_up_tags
from mvllm.engine.process.async_core_client import AsyncEngineCoreClient
from mvllm.engine.run_to_end import run_to_end
from mvllm.errors import EngineSleepingError
from mvllm.messages.commands import CheckSleep, Sleep, WakeUp


class AsyncSleep:
    """Frees the memory of an AsyncLLM, and allocates it again. Other front ends of the same engine follow.

    Args:
        client: Its engine cores.
        abort_all: Aborts all requests.
        require_alive: Raises if it is closed or dead.
        is_dead: Whether it has died.

    Attributes:
        is_asleep: Whether it sleeps: requests are refused.
    """

    def __init__(
        self,
        client: AsyncEngineCoreClient,
        abort_all: Callable[[], None],
        require_alive: Callable[[], None],
        is_dead: Callable[[], bool],
    ) -> None:
        self._client = client
        self._abort_all = abort_all
        self._require_alive = require_alive
        self._is_dead = is_dead
        self._lock = asyncio.Lock()
        self.is_asleep = False

    @property
    def is_changing(self) -> bool:
        """Whether `sleep` or `wake_up` is under way."""
        return self._lock.locked()

    async def sleep(self, level: int = 1) -> None:
        """Aborts all requests, frees memory, and rejects requests until `wake_up`. Goes on if the caller is cancelled.

        Args:
            level: 1 frees the KV cache, and moves the weights to host memory if the device has a memory of its own;
                2 drops both, and `wake_up` reads the checkpoint again.

        Raises:
            RequestError: `level` is neither 1 nor 2, a weight update is under way, or the host has no memory for the
                weights; nothing was aborted.
            PlatformError: The platform's worker does not support it; requests are accepted as before.
        """
        check_sleep_level(level)
        self._require_alive()
        await run_to_end(self._sleep(level))

    async def _sleep(self, level: int) -> None:
        async with self._lock:
            was_asleep, self.is_asleep = self.is_asleep, True  # rejects new requests
            try:
                await self._client.call(CheckSleep(level))
            except BaseException:  # also the end of the event loop
                self.is_asleep = was_asleep
                raise
            self._abort_all()
            await self._client.broadcast_sleep(True)
            try:
                await self._client.call(Sleep(level))
            except Exception:
                self.is_asleep = not self._is_dead() and not await self._client.call(WakeUp([]))
                await self._client.broadcast_sleep(self.is_asleep)
                raise

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocates memory again, and accepts requests once all of it is allocated. Goes on if the caller is cancelled.

        Args:
            tags: What to allocate, of `weights` and `kv_cache`; all by default.

        Raises:
            RequestError: A tag is unknown, or the KV cache would be allocated before the weights.
            CacheError, ModelError: Memory or the checkpoint is missing. The call can be repeated.
        """
        checked_tags = check_wake_up_tags(tags)
        self._require_alive()
        await run_to_end(self._wake_up(checked_tags))

    async def _wake_up(self, tags: list[str]) -> None:
        async with self._lock:
            self.is_asleep = not await self._client.call(WakeUp(tags))
            await self._client.broadcast_sleep(self.is_asleep)

    async def is_sleeping(self) -> bool:
        """Whether the engine sleeps."""
        return self.is_asleep

    def require_awake(self) -> None:
        """Raises EngineSleepingError if it sleeps."""
        if self.is_asleep:
            raise EngineSleepingError("The engine has been put to sleep. Wake it up (wake_up) before sending requests.")

    def follow(self, is_asleep: bool) -> None:
        """Another front end of the same engine has put it to sleep, or has woken it up."""
        self.is_asleep = is_asleep
        if is_asleep:
            self._abort_all()

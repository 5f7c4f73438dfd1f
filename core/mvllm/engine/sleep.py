"""The part of LLMEngine that puts the engine to sleep and wakes it up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mvllm.engine.core.sleep import check_sleep_level, check_wake_up_tags
from mvllm.engine.process.engine_core_client import EngineCoreClient
from mvllm.engine.shared_steps import SharedSteps, exclusive
from mvllm.errors import EngineSleepingError, MvllmError
from mvllm.messages.commands import CheckSleep, Sleep, WakeUp


class EngineSleep:
    """Frees the memory of an LLMEngine, and allocates it again.

    Args:
        client: Its engine core.
        steps: Its steps, between which commands take effect.
        fail_all_requests: Ends all requests with an error.
        require_alive: Raises if it is closed or dead.

    Attributes:
        is_asleep: Whether it sleeps.
    """

    def __init__(
        self,
        client: EngineCoreClient,
        steps: SharedSteps,
        fail_all_requests: Callable[[MvllmError], None],
        require_alive: Callable[[], None],
    ) -> None:
        self._client = client
        self._shared_steps = steps
        self._fail_all_requests = fail_all_requests
        self._require_alive = require_alive
        self.is_asleep = False

    @exclusive
    def sleep(self, level: int = 1) -> None:
        """Aborts all requests, frees memory, and rejects requests until `wake_up`.

        Args:
            level: 1 frees the KV cache, and moves the weights to host memory if the device has a memory of its own;
                2 drops both, and `wake_up` reads the checkpoint again.

        Raises:
            RequestError: `level` is neither 1 nor 2, a weight update is under way, or the host has no memory for the
                weights; nothing was aborted.
            PlatformError: The platform's worker does not support it; requests are accepted as before.
        """
        self._require_alive()
        check_sleep_level(level)
        self._client.call(CheckSleep(level))
        self._fail_all_requests(EngineSleepingError("The engine was put to sleep before the request had finished."))
        self._client.call(Sleep(level))
        self.is_asleep = True

    @exclusive
    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocates memory again, and accepts requests once all of it is allocated.

        Args:
            tags: What to allocate, of `weights` and `kv_cache`; all by default.

        Raises:
            RequestError: A tag is unknown, or the KV cache would be allocated before the weights.
            CacheError, ModelError: Memory or the checkpoint is missing. The call can be repeated.
        """
        self._require_alive()
        self.is_asleep = not self._client.call(WakeUp(check_wake_up_tags(tags)))

    def require_awake(self) -> None:
        """Raises EngineSleepingError if it sleeps."""
        if self.is_asleep:
            raise EngineSleepingError("The engine has been put to sleep. Wake it up (wake_up) before sending requests.")

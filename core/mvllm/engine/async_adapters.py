"""The part of AsyncLLM for LoRA adapters: loading, unloading and replacing them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from mvllm.engine.async_rollouts import AsyncRollouts
from mvllm.engine.frontend.lora_request_validator import LoRARequestValidator
from mvllm.engine.process.async_core_client import AsyncEngineCoreClient
from mvllm.engine.run_to_end import run_to_end
from mvllm.messages.commands import AddLoRA, RemoveLoRA, UpdateLoRA
from mvllm.messages.lora import LoRARequest


class AsyncAdapters:
    """Loads, unloads and replaces the LoRA adapters of an AsyncLLM.

    Args:
        client: Its engine cores.
        validator: Knows the loaded adapters.
        rollouts: A replaced adapter is a weight update.
        run_in_thread: Runs a function in a thread of the engine.
        require_alive: Raises if the engine is closed or dead.
    """

    def __init__(
        self,
        client: AsyncEngineCoreClient,
        validator: LoRARequestValidator,
        rollouts: AsyncRollouts,
        run_in_thread: Callable[[Callable[[], None]], Awaitable[None]],
        require_alive: Callable[[], None],
    ) -> None:
        self._client = client
        self._validator = validator
        self._rollouts = rollouts
        self._run_in_thread = run_in_thread
        self._require_alive = require_alive

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Loads an adapter before its first request. With several front ends, call it on each of them.

        Returns:
            Whether it was not loaded before.

        Raises:
            RequestError: Its files are not usable with this model, or its id belongs to another adapter.
            EngineSleepingError: The engine sleeps.
        """
        self._require_alive()
        validator = self._validator
        if validator.is_loaded(validator.validate(lora_request)):
            return False
        await self._run_in_thread(lambda: validator.check_files(lora_request))
        return await run_to_end(self._add_checked_lora(lora_request))

    async def _add_checked_lora(self, lora_request: LoRARequest) -> bool:
        validator = self._validator
        await self._client.call(AddLoRA(lora_request))
        if validator.is_loaded(validator.validate(lora_request)):  # by a concurrent call
            return False
        validator.add(lora_request)
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """Removes an adapter and frees its id. Unfinished requests that use it continue.

        Returns:
            Whether it was loaded.
        """
        self._require_alive()
        known = self._validator.remove(lora_id)
        if known:
            await run_to_end(self._client.call(RemoveLoRA(lora_id)))
        return known

    async def list_loras(self) -> set[int]:
        """The ids of the loaded adapters."""
        return self._validator.ids

    async def update_lora(self, lora_request: LoRARequest) -> None:
        """Loads an adapter anew in place of the one of its id, see `LLM.update_lora`."""
        self._require_alive()
        self._validator.validate_update(lora_request)
        await run_to_end(self._update_lora(lora_request))

    async def _update_lora(self, lora_request: LoRARequest) -> None:
        await self._rollouts.call_long(UpdateLoRA(lora_request))
        self._validator.add(lora_request)

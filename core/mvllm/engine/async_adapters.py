"""LoRA adapters of AsyncLLM: loading, unloading and replacing them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TypeVar

from mvllm.engine.async_rollouts import AsyncRollouts
from mvllm.engine.frontend.lora_request_validator import LoRARequestValidator
from mvllm.engine.run_to_end import run_to_end
from mvllm.messages.commands import AddLoRA, RemoveLoRA, UpdateLoRA
from mvllm.messages.lora import LoRARequest

_T = TypeVar("_T")


class AsyncAdapters(AsyncRollouts):
    """Base of AsyncLLM, which defines the attributes that it uses."""

    _lora_validator: LoRARequestValidator

    @abstractmethod
    async def _run_in_thread(self, work: Callable[[], _T]) -> _T:
        """Runs a function in a thread of the engine."""

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Loads an adapter before its first request. With several front ends, call it on each of them.

        Returns:
            Whether it was not loaded before.

        Raises:
            RequestError: Its files are not usable with this model, or its id belongs to another adapter.
            EngineSleepingError: The engine sleeps.
        """
        self._require_alive()
        validator = self._lora_validator
        if validator.is_loaded(validator.validate(lora_request)):
            return False
        await self._run_in_thread(lambda: validator.check_files(lora_request))
        return await run_to_end(self._add_checked_lora(lora_request))

    async def _add_checked_lora(self, lora_request: LoRARequest) -> bool:
        validator = self._lora_validator
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
        known = self._lora_validator.remove(lora_id)
        if known:
            await run_to_end(self._client.call(RemoveLoRA(lora_id)))
        return known

    async def list_loras(self) -> set[int]:
        """The ids of the loaded adapters."""
        return self._lora_validator.ids

    async def update_lora(self, lora_request: LoRARequest) -> None:
        """Loads an adapter anew in place of the one of its id, see `LLM.update_lora`."""
        self._require_alive()
        self._lora_validator.validate_update(lora_request)
        await run_to_end(self._update_lora(lora_request))

    async def _update_lora(self, lora_request: LoRARequest) -> None:
        await self._call_long(UpdateLoRA(lora_request))
        self._lora_validator.add(lora_request)

"""The part of LLMEngine for LoRA adapters: loading, unloading and replacing them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mvllm.engine.frontend.input_processor import ProcessedRequest
from mvllm.engine.frontend.lora_request_validator import LoRARequestValidator
from mvllm.engine.process.engine_core_client import EngineCoreClient
from mvllm.engine.shared_steps import SharedSteps, exclusive
from mvllm.messages.commands import AddLoRA, RemoveLoRA, UpdateLoRA
from mvllm.messages.lora import LoRARequest


class EngineAdapters:
    """Loads, unloads and replaces the LoRA adapters of an LLMEngine.

    Args:
        client: Its engine core.
        steps: Its steps, between which commands take effect.
        validator: Knows the loaded adapters.
        require_alive: Raises if it is closed or dead.
    """

    def __init__(
        self,
        client: EngineCoreClient,
        steps: SharedSteps,
        validator: LoRARequestValidator,
        require_alive: Callable[[], None],
    ) -> None:
        self._client = client
        self._shared_steps = steps
        self._validator = validator
        self._require_alive = require_alive

    @exclusive
    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Loads an adapter before its first request.

        Returns:
            Whether it was not loaded before.

        Raises:
            RequestError: Its files are not usable with this model, or its id belongs to another adapter.
        """
        self._require_alive()
        request = self._validator.validate(lora_request)
        if self._validator.is_loaded(request):
            return False
        self._validator.check_files(request)
        self._client.call(AddLoRA(request))
        self._validator.add(request)
        return True

    @exclusive
    def remove_lora(self, lora_id: int) -> bool:
        """Removes an adapter and frees its id. Unfinished requests that use it continue.

        Returns:
            Whether it was loaded.
        """
        self._require_alive()
        known = self._validator.remove(lora_id)
        if known:
            self._client.call(RemoveLoRA(lora_id))
        return known

    def list_loras(self) -> set[int]:
        """The ids of the loaded adapters."""
        return self._validator.ids

    @exclusive
    def update_lora(self, lora_request: LoRARequest) -> None:
        """Loads an adapter anew, in place of the loaded one of its id; unfinished requests continue with the new one.

        The version of the weights rises by one. Within a weight update it is a part of that.

        Raises:
            RequestError: Its files are not usable with this model. The present adapter stays.
        """
        self._require_alive()
        self._validator.validate_update(lora_request)
        self._client.call(UpdateLoRA(lora_request))
        self._validator.add(lora_request)

    def load_for(self, requests: Sequence[ProcessedRequest]) -> None:
        """Loads the adapters of requests that are not loaded yet."""
        adapters = {id(lora): lora for request in requests if (lora := request.core.lora_request) is not None}
        for lora_request in adapters.values():
            self.add_lora(lora_request)

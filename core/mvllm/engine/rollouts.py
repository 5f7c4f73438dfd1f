"""The methods of LLMEngine for reinforcement learning: pause, weight updates, calls of the workers."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mvllm.engine.frontend.lora_request_validator import LoRARequestValidator
from mvllm.engine.frontend.weight_update_source import transfer_info, update_info, weight_update
from mvllm.errors import RequestError
from mvllm.messages.lora import LoRARequest
from mvllm.messages.weights import WeightTransferInfo

if TYPE_CHECKING:
    from mvllm.engine.llm_engine import EngineCoreClient

JOIN_POLL_SECONDS = 0.02
"""Between two questions whether a trainer's process group is complete."""


class EngineRollouts(ABC):
    """Base of LLMEngine, which defines the attributes that it uses."""

    _client: EngineCoreClient
    _lora_validator: LoRARequestValidator
    _may_be_paused = False  # by this front end, the only one

    @abstractmethod
    def _require_alive(self) -> None:
        """Raises if the engine is closed or dead."""

    def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> bool:
        """As `AsyncLLM.pause_generation`; does not wait for requests to finish, which need further steps.

        Returns:
            Whether the engine is paused now. With `wait` and unfinished requests it is not: run steps until
            `is_scheduler_paused`.
        """
        self._require_alive()
        self._may_be_paused = True
        return bool(self._client.call_utility("pause_scheduler", mode, clear_cache))

    def resume_generation(self) -> None:
        """As `AsyncLLM.resume_generation`."""
        self._require_alive()
        self._client.call_utility("resume_scheduler")

    def is_scheduler_paused(self) -> bool:
        """As `AsyncLLM.is_scheduler_paused`."""
        self._require_alive()
        return bool(self._client.call_utility("is_scheduler_paused"))

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any] | WeightTransferInfo) -> None:
        """As `AsyncLLM.init_weight_transfer_engine`."""
        self._require_alive()
        self._client.call_utility("init_weight_transfer", transfer_info(init_info))
        has_joined = False
        try:
            while not (has_joined := self._client.call_utility("has_joined_weight_transfer", False)):
                time.sleep(JOIN_POLL_SECONDS)
        finally:
            if not has_joined:  # also interrupted
                self._client.call_utility("has_joined_weight_transfer", True)

    def start_weight_update(self) -> None:
        """As `AsyncLLM.start_weight_update`."""
        self._require_alive()
        self._may_be_paused = True
        self._client.call_utility("start_weight_update")

    def update_weights(self, fields: Mapping[str, Any]) -> None:
        """Loads weights into the running model; `fields` are the arguments of `LLM.update_weights`."""
        self._require_alive()
        self._may_be_paused = True  # after an error
        shares_tensors = getattr(self._client, "has_local_worker", False)
        with weight_update(update_info(fields), shares_tensors=shares_tensors) as update:
            self._client.call_utility("update_weights", update)

    def finish_weight_update(self, weight_version: int | None = None, *, reset_running_requests: bool = False) -> int:
        """See `LLM.finish_weight_update`."""
        self._require_alive()
        return int(self._client.call_utility("finish_weight_update", weight_version, reset_running_requests))

    def abandon_weight_update(self) -> None:
        """See `LLM.abandon_weight_update`."""
        self._require_alive()
        self._client.call_utility("abandon_weight_update")

    def weight_info(self) -> dict[str, Any]:
        """As `AsyncLLM.weight_info`."""
        self._require_alive()
        return dict(self._client.call_utility("weight_info"))

    def update_lora(self, lora_request: LoRARequest) -> None:
        """See `LLM.update_lora`."""
        self._require_alive()
        self._lora_validator.validate_update(lora_request)
        self._client.call_utility("update_lora", lora_request)
        self._lora_validator.add(lora_request)

    def call_workers(
        self, method: str, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Calls a method of `worker_extension_cls` on every worker; returns the results in rank order."""
        self._require_alive()
        return list(self._client.call_utility("call_workers", method, list(args), dict(kwargs or {})))

    def require_not_paused(self) -> None:
        """Raises RequestError if new requests would wait."""
        self._require_alive()
        if self._may_be_paused and not self._client.call_utility("is_scheduler_running"):
            raise RequestError(
                "The engine is paused, so no output would come. Resume it first (resume_generation, or "
                "finish_weight_update)."
            )

"""The methods of LLMEngine for reinforcement learning: pause, weight updates, calls of the workers."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from mvllm.engine.frontend.lora_request_validator import LoRARequestValidator
from mvllm.engine.frontend.weight_update_source import transfer_info, update_info, weight_update
from mvllm.engine.process.engine_core_client import EngineCoreClient
from mvllm.engine.shared_steps import exclusive
from mvllm.errors import RequestError
from mvllm.messages.lora import LoRARequest
from mvllm.messages.weights import WeightTransferInfo

JOIN_POLL_SECONDS = 0.02
"""Between two questions whether a trainer's process group is complete."""

DRAIN_POLL_SECONDS = 0.01
"""Between two questions whether the scheduler is paused."""


class EngineRollouts(ABC):
    """Base of LLMEngine, which defines the attributes that it uses."""

    _client: EngineCoreClient
    _lora_validator: LoRARequestValidator
    _may_be_paused = False  # by this front end, the only one

    @property
    @abstractmethod
    def is_driven(self) -> bool:
        """Whether a call in another thread runs steps, or waits for work."""

    @abstractmethod
    def _require_alive(self) -> None:
        """Raises if the engine is closed or dead."""

    @exclusive
    def _call_core(self, method: str, *args: Any) -> Any:
        """Calls a utility method of the engine core between two steps."""
        self._require_alive()
        return self._client.call_utility(method, *args)

    def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> bool:
        """As `AsyncLLM.pause_generation`. With `wait`, waits for requests to finish while callers in other threads run
        steps; requests of `add_request` alone need further calls of `step`.

        Returns:
            Whether the engine is paused now. Otherwise run steps until `is_scheduler_paused`.

        Raises:
            RequestError: There is no such mode, or the engine was resumed before all requests had finished.
        """
        self._may_be_paused = True
        paused = bool(self._call_core("pause_scheduler", mode, clear_cache))
        while not paused:
            is_driven = self.is_driven
            if self._call_core("is_scheduler_running"):
                raise RequestError("The engine was resumed before its requests had finished, so it is not paused.")
            paused = self.is_scheduler_paused()
            if not is_driven:
                break
            time.sleep(DRAIN_POLL_SECONDS)
        return paused

    def resume_generation(self) -> None:
        """As `AsyncLLM.resume_generation`."""
        self._call_core("resume_scheduler")

    def is_scheduler_paused(self) -> bool:
        """As `AsyncLLM.is_scheduler_paused`."""
        return bool(self._call_core("is_scheduler_paused"))

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any] | WeightTransferInfo) -> None:
        """As `AsyncLLM.init_weight_transfer_engine`."""
        self._require_alive()
        self._call_core("init_weight_transfer", transfer_info(init_info))
        has_joined = False
        try:
            while not (has_joined := self._call_core("has_joined_weight_transfer", False)):
                time.sleep(JOIN_POLL_SECONDS)
        finally:
            if not has_joined:  # also interrupted
                self._call_core("has_joined_weight_transfer", True)

    def start_weight_update(self) -> None:
        """As `AsyncLLM.start_weight_update`."""
        self._may_be_paused = True
        self._call_core("start_weight_update")

    def update_weights(self, fields: Mapping[str, Any]) -> None:
        """Loads weights into the running model; `fields` are the arguments of `LLM.update_weights`."""
        self._require_alive()
        self._may_be_paused = True  # after an error
        shares_tensors = getattr(self._client, "has_local_worker", False)
        with weight_update(update_info(fields), shares_tensors=shares_tensors) as update:
            self._call_core("update_weights", update)

    def finish_weight_update(self, weight_version: int | None = None, *, reset_running_requests: bool = False) -> int:
        """See `LLM.finish_weight_update`."""
        return int(self._call_core("finish_weight_update", weight_version, reset_running_requests))

    def abandon_weight_update(self) -> None:
        """See `LLM.abandon_weight_update`."""
        self._call_core("abandon_weight_update")

    def weight_info(self) -> dict[str, Any]:
        """As `AsyncLLM.weight_info`."""
        return dict(self._call_core("weight_info"))

    @exclusive
    def update_lora(self, lora_request: LoRARequest) -> None:
        """See `LLM.update_lora`."""
        self._require_alive()
        self._lora_validator.validate_update(lora_request)
        self._call_core("update_lora", lora_request)
        self._lora_validator.add(lora_request)

    def call_workers(
        self, method: str, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Calls a method of `worker_extension_cls` on every worker; returns the results in rank order."""
        return list(self._call_core("call_workers", method, list(args), dict(kwargs or {})))

    def require_not_paused(self) -> None:
        """Raises RequestError if new requests would wait."""
        self._require_alive()
        if self._may_be_paused and not self._call_core("is_scheduler_running"):
            raise RequestError(
                "The engine is paused, so no output would come. Resume it first (resume_generation, or "
                "finish_weight_update)."
            )

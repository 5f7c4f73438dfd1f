"""The methods of LLMEngine for reinforcement learning: pause, weight updates, calls of the workers."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from mvllm.engine.frontend.lora_request_validator import LoRARequestValidator
from mvllm.engine.frontend.weight_update_source import transfer_info, update_info, weight_update
from mvllm.engine.shared_steps import exclusive
from mvllm.errors import RequestError
from mvllm.messages.commands import (
    AbandonWeightUpdate,
    CallWorkers,
    EngineCommand,
    FinishWeightUpdate,
    HasJoinedWeightTransfer,
    InitWeightTransfer,
    IsSchedulerPaused,
    IsSchedulerRunning,
    PauseScheduler,
    ResumeScheduler,
    StartWeightUpdate,
    UpdateLoRA,
    UpdateWeights,
    WeightInfo,
)
from mvllm.messages.lora import LoRARequest
from mvllm.messages.weights import WeightTransferInfo

if TYPE_CHECKING:
    from mvllm.engine.llm_engine import EngineCoreClient

_R = TypeVar("_R")

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
    def _call_core(self, command: EngineCommand[_R]) -> _R:
        """The engine core's answer to a command, between two steps."""
        self._require_alive()
        return self._client.call(command)

    def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> bool:
        """As `AsyncLLM.pause_generation`. With `wait`, waits for requests to finish while callers in other threads run
        steps; requests of `add_request` alone need further calls of `step`.

        Returns:
            Whether the engine is paused now. Otherwise run steps until `is_scheduler_paused`.

        Raises:
            RequestError: There is no such mode, or the engine was resumed before all requests had finished.
        """
        self._may_be_paused = True
        paused = self._call_core(PauseScheduler(mode, clear_cache))
        while not paused:
            is_driven = self.is_driven
            if self._call_core(IsSchedulerRunning()):
                raise RequestError("The engine was resumed before its requests had finished, so it is not paused.")
            paused = self.is_scheduler_paused()
            if not is_driven:
                break
            time.sleep(DRAIN_POLL_SECONDS)
        return paused

    def resume_generation(self) -> None:
        """As `AsyncLLM.resume_generation`."""
        self._call_core(ResumeScheduler())

    def is_scheduler_paused(self) -> bool:
        """As `AsyncLLM.is_scheduler_paused`."""
        return self._call_core(IsSchedulerPaused())

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any] | WeightTransferInfo) -> None:
        """As `AsyncLLM.init_weight_transfer_engine`."""
        self._require_alive()
        self._call_core(InitWeightTransfer(transfer_info(init_info)))
        has_joined = False
        try:
            while not (has_joined := self._call_core(HasJoinedWeightTransfer(False))):
                time.sleep(JOIN_POLL_SECONDS)
        finally:
            if not has_joined:  # also interrupted
                self._call_core(HasJoinedWeightTransfer(True))

    def start_weight_update(self) -> None:
        """As `AsyncLLM.start_weight_update`."""
        self._may_be_paused = True
        self._call_core(StartWeightUpdate())

    def update_weights(self, fields: Mapping[str, Any]) -> None:
        """Loads weights into the running model; `fields` are the arguments of `LLM.update_weights`."""
        self._require_alive()
        self._may_be_paused = True  # after an error
        shares_tensors = getattr(self._client, "has_local_worker", False)
        with weight_update(update_info(fields), shares_tensors=shares_tensors) as update:
            self._call_core(UpdateWeights(update))

    def finish_weight_update(self, weight_version: int | None = None, *, reset_running_requests: bool = False) -> int:
        """See `LLM.finish_weight_update`."""
        return self._call_core(FinishWeightUpdate(weight_version, reset_running_requests))

    def abandon_weight_update(self) -> None:
        """See `LLM.abandon_weight_update`."""
        self._call_core(AbandonWeightUpdate())

    def weight_info(self) -> dict[str, Any]:
        """As `AsyncLLM.weight_info`."""
        return self._call_core(WeightInfo())

    @exclusive
    def update_lora(self, lora_request: LoRARequest) -> None:
        """See `LLM.update_lora`."""
        self._require_alive()
        self._lora_validator.validate_update(lora_request)
        self._call_core(UpdateLoRA(lora_request))
        self._lora_validator.add(lora_request)

    def call_workers(
        self, method: str, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Calls a method of `worker_extension_cls` on every worker; returns the results in rank order."""
        return self._call_core(CallWorkers(method, list(args), dict(kwargs or {})))

    def require_not_paused(self) -> None:
        """Raises RequestError if new requests would wait."""
        self._require_alive()
        if self._may_be_paused and not self._call_core(IsSchedulerRunning()):
            raise RequestError(
                "The engine is paused, so no output would come. Resume it first (resume_generation, or "
                "finish_weight_update)."
            )

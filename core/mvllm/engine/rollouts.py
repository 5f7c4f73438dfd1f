"""The part of LLMEngine for reinforcement learning: pause, weight updates, calls of the workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mvllm.engine.frontend.weight_update_source import transfer_info, update_info, weight_update
from mvllm.engine.process.engine_core_client import EngineCoreClient
from mvllm.engine.shared_steps import SharedSteps, exclusive
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
    UpdateWeights,
    WeightInfo,
)
from mvllm.messages.weights import WeightTransferInfo

if TYPE_CHECKING:
    import torch

_R = TypeVar("_R")

JOIN_POLL_SECONDS = 0.02
"""Between two questions whether a trainer's process group is complete."""

DRAIN_POLL_SECONDS = 0.01
"""Between two questions whether the scheduler is paused."""


class EngineRollouts:
    """Pauses an LLMEngine and changes its weights.

    Args:
        client: Its engine core.
        steps: Its steps, between which commands take effect.
        require_alive: Raises if it is closed or dead.
    """

    def __init__(
        self,
        client: EngineCoreClient,
        steps: SharedSteps,
        require_alive: Callable[[], None],
    ) -> None:
        self._client = client
        self._shared_steps = steps
        self._require_alive = require_alive
        self._may_be_paused = False  # by this front end, the only one

    @exclusive
    def call(self, command: EngineCommand[_R]) -> _R:
        """The engine core's answer to a command, between two steps."""
        self._require_alive()
        return self._client.call(command)

    def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> bool:
        """As `AsyncLLM.pause_generation`. With `wait`, waits for requests to finish while callers in other threads run
        steps; requests of `add_request` alone need further calls of `step`.

        Returns:
            Whether the engine is paused now. Otherwise run steps until `is_paused`.

        Raises:
            RequestError: There is no such mode, or the engine was resumed before all requests had finished.
        """
        self._may_be_paused = True
        paused = self.call(PauseScheduler(mode, clear_cache))
        while not paused:
            is_driven = self._shared_steps.is_driven
            if self.call(IsSchedulerRunning()):
                raise RequestError("The engine was resumed before its requests had finished, so it is not paused.")
            paused = self.is_paused()
            if not is_driven:
                break
            time.sleep(DRAIN_POLL_SECONDS)
        return paused

    def resume_generation(self) -> None:
        """As `AsyncLLM.resume_generation`."""
        self.call(ResumeScheduler())

    def is_paused(self) -> bool:
        """Whether no step runs until `resume_generation`, or until the end of a weight update."""
        return self.call(IsSchedulerPaused())

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any] | WeightTransferInfo) -> None:
        """As `AsyncLLM.init_weight_transfer_engine`."""
        self._require_alive()
        self.call(InitWeightTransfer(transfer_info(init_info)))
        has_joined = False
        try:
            while not (has_joined := self.call(HasJoinedWeightTransfer(False))):
                time.sleep(JOIN_POLL_SECONDS)
        finally:
            if not has_joined:  # also interrupted
                self.call(HasJoinedWeightTransfer(True))

    def start_weight_update(self) -> None:
        """As `AsyncLLM.start_weight_update`."""
        self._may_be_paused = True
        self.call(StartWeightUpdate())

    def update_weights(
        self,
        update_info_: Mapping[str, Any] | None = None,
        /,
        *,
        path: str | Path | None = None,
        shared_memory: str | None = None,
        safetensors: bytes | None = None,
        tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | None = None,
        names: list[str] | None = None,
        dtype_names: list[str] | None = None,
        shapes: list[list[int]] | None = None,
    ) -> None:
        """Loads weights into the running model, by their names in the checkpoint.

        Between `start_weight_update` and `finish_weight_update` it loads one part of the update; otherwise it is a
        whole update, and the version of the weights rises by one.

        Args:
            update_info_: The other arguments as a dict.
            path: A checkpoint folder. Without `names` it must have every weight of the model.
            shared_memory: The name of a segment of shared memory with a safetensors file, see SharedMemoryWeights.
            safetensors: The bytes of a safetensors file.
            tensors: Tensors by name, or (name, tensor) pairs, on any device.
            names: The tensors to load, of all that the source has.
            dtype_names, shapes: With `names`, describe the tensors that a trainer broadcasts in this order, see
                `init_weight_transfer_engine`.

        Raises:
            RequestError: There is not exactly one source, or its tensors do not fit the model. Nothing was written.
            MvllmError: Writing has failed: requests are refused until an update with every weight is finished.
        """
        fields = {
            "path": path,
            "shared_memory": shared_memory,
            "safetensors": safetensors,
            "tensors": tensors,
            "names": names,
            "dtype_names": dtype_names,
            "shapes": shapes,
        }
        self._require_alive()
        self._may_be_paused = True  # after an error
        shares_tensors = getattr(self._client, "has_local_worker", False)
        with weight_update(update_info({**fields, **(update_info_ or {})}), shares_tensors=shares_tensors) as update:
            self.call(UpdateWeights(update))

    def finish_weight_update(self, weight_version: int | None = None, *, reset_running_requests: bool = False) -> int:
        """Ends a weight update: the weights get a new version, the prefix cache is dropped, and the engine resumes
        unless it was paused before.

        Args:
            weight_version: The new version; None for one more than the last.
            reset_running_requests: Unfinished requests compute their keys and values again, with the new weights.
                Otherwise they continue with those of the old ones.

        Returns:
            The new version.

        Raises:
            RequestError: Tensors are missing; names them. The update stays open.
        """
        return self.call(FinishWeightUpdate(weight_version, reset_running_requests))

    def abandon_weight_update(self) -> None:
        """Ends a weight update without its remaining parts. If a part was written, requests are refused until an update
        with every weight is finished."""
        self.call(AbandonWeightUpdate())

    def weight_info(self) -> dict[str, Any]:
        """As `AsyncLLM.weight_info`."""
        return self.call(WeightInfo())

    def call_workers(
        self, method: str, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Calls a method of `worker_extension_cls` on every worker; returns the results in rank order."""
        return self.call(CallWorkers(method, list(args), dict(kwargs or {})))

    def require_not_paused(self) -> None:
        """Raises RequestError if new requests would wait."""
        self._require_alive()
        if self._may_be_paused and not self.call(IsSchedulerRunning()):
            raise RequestError(
                "The engine is paused, so no output would come. Resume it first (resume_generation, or "
                "finish_weight_update)."
            )

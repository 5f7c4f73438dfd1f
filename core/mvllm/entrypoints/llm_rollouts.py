"""The methods of LLM for reinforcement learning: pause, weight updates, calls of the workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mvllm.engine.llm_engine import LLMEngine
from mvllm.messages.lora import LoRARequest
from mvllm.messages.weights import WeightTransferInfo

if TYPE_CHECKING:
    import torch


class LLMRollouts(ABC):
    """Base of LLM."""

    @property
    @abstractmethod
    def llm_engine(self) -> LLMEngine:
        """The engine that runs the requests."""

    def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Stops computing. Only requests added through `llm_engine` can be unfinished then.

        Args:
            mode, clear_cache: As for `AsyncLLM.pause_generation`.

        Raises:
            RequestError: There is no such mode.
        """
        self.llm_engine.pause_generation(mode=mode, clear_cache=clear_cache)

    def resume_generation(self) -> None:
        """Continues after `pause_generation`, see `AsyncLLM.resume_generation`."""
        self.llm_engine.resume_generation()

    def is_paused(self) -> bool:
        """Whether the engine is paused."""
        return self.llm_engine.is_scheduler_paused()

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any] | WeightTransferInfo) -> None:
        """Joins a trainer's process group, see `AsyncLLM.init_weight_transfer_engine`."""
        self.llm_engine.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        """Begins a weight update of several parts, see `AsyncLLM.start_weight_update`."""
        self.llm_engine.start_weight_update()

    def update_weights(
        self,
        update_info: Mapping[str, Any] | None = None,
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
            update_info: The other arguments as a dict.
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
        self.llm_engine.update_weights({**fields, **(update_info or {})})

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
        return self.llm_engine.finish_weight_update(weight_version, reset_running_requests=reset_running_requests)

    def abandon_weight_update(self) -> None:
        """Ends a weight update without its remaining parts. If a part was written, requests are refused until an update
        with every weight is finished."""
        self.llm_engine.abandon_weight_update()

    def weight_info(self) -> dict[str, Any]:
        """`weight_version`, `is_updating`, and `failure`: why the weights are unusable, or None."""
        return self.llm_engine.weight_info()

    def update_lora(self, lora_request: LoRARequest) -> None:
        """Loads an adapter anew, in place of the loaded one of its id; unfinished requests continue with the new one.

        The version of the weights rises by one. Within a weight update it is a part of that.

        Raises:
            RequestError: Its files are not usable with this model. The present adapter stays.
        """
        self.llm_engine.update_lora(lora_request)

"""The LoRA adapters of one worker: loaded on the host, and in slots on the device.

    host (lora_int_id)        1  2  3  5  8        the engine core limits their number
    slots                     [ 2 | 8 | 5 ]        max_loras; filled before the step that needs them

The engine core has all workers load an adapter (`add_adapter`) before it plans a step with it, and plans at most
`max_loras` different ones for running requests. So a step reads no files, and always finds a slot.
"""

from __future__ import annotations

import numpy as np
import torch

from mvllm.config.engine_config import LoRAConfig
from mvllm.errors import ModelError, RequestError
from mvllm.layers.context import BuildContext
from mvllm.layers.linear import Linear
from mvllm.layers.lora import CurrentLoRAMapping, LoRALayerWeights, LoRAMapping, StackedLoRAWeights
from mvllm.messages.lora import LoRARequest
from mvllm.models.causal_lm import CausalLM
from mvllm.models.lora_weights import load_lora_weights
from mvllm.models.peft_adapter import read_peft_adapter
from mvllm.platform.runtime import DeviceRuntime


class LoRAModelManager:
    """Adds LoRA weights to the linear layers of a loaded model, and manages the adapters.

    Args:
        model: The model.
        ctx: Its build context.
        config: Number and rank of adapters.
        runtime: The device.
        only_by_slot: As in StackedLoRAWeights.

    Attributes:
        step: The LoRA mapping that the layers read in the current step.
        arrays: The adapter slots of all layers, by their places in the model.
        num_copied: How often an adapter was copied to a slot.
    """

    def __init__(
        self,
        model: CausalLM,
        ctx: BuildContext,
        config: LoRAConfig,
        runtime: DeviceRuntime,
        *,
        only_by_slot: bool = False,
    ) -> None:
        self.step = CurrentLoRAMapping()
        self._model = model
        self._dtype = ctx.dtype
        self._config = config
        self._runtime = runtime
        layers = {
            path: StackedLoRAWeights(
                module, ctx, self.step, config.max_loras, config.max_lora_rank, only_by_slot=only_by_slot
            )
            for path, module in model.named_modules()
            if isinstance(module, Linear) and module.supports_lora
        }
        self._layers = list(layers.values())
        self.arrays = {
            f"{path}.{name}": array for path, layer in layers.items() for name, array in layer.arrays.items()
        }
        self.num_copied = 0
        self._by_slot = any(layer.by_slot for layer in self._layers)
        self._only_by_slot = all(layer.by_slot for layer in self._layers)
        self._shapes = {name: shape for layer in self._layers for name, shape in layer.shapes.items()}
        self._loaded: dict[int, dict[str, LoRALayerWeights]] = {}
        self._slots: dict[int, int] = {}  # adapter -> slot, least recently used first

    def add_adapter(self, request: LoRARequest) -> None:
        """Loads an adapter, unless it is loaded already.

        Raises:
            RequestError: Its files are not usable with this model.
        """
        if request.lora_int_id in self._loaded:
            return
        try:
            folder = read_peft_adapter(request.lora_path, self._config.max_lora_rank)
            adapter = load_lora_weights(folder, self._model, self._shapes, self._dtype)
        except (ModelError, MemoryError) as e:
            message = f"The adapter {request.lora_name!r} cannot be loaded: {e}"
            raise RequestError(message, parameter="lora_request") from e
        self._loaded[request.lora_int_id] = adapter

    def remove_adapter(self, lora_int_id: int) -> None:
        """Removes an adapter, if it is loaded."""
        self._loaded.pop(lora_int_id, None)
        self._slots.pop(lora_int_id, None)

    def prepare_batch(self, ids: np.ndarray, num_scheduled: np.ndarray, num_tokens: int) -> LoRAMapping | None:
        """The LoRA mapping of a step, whose adapters are put into slots; None if no request has a loaded adapter.

        Args:
            ids: [R]: adapter of each request, in batch order; 0 for none. An adapter that could not be loaded is
                skipped: the engine core has failed its requests.
            num_scheduled: [R]: tokens of each request.
            num_tokens: Tokens of the step, padding included.
        """
        wanted = [int(i) for i in np.unique(ids) if int(i) in self._loaded]
        if not wanted:
            return None
        slots = self._claim_slots(wanted)
        token_adapters = np.repeat(ids, num_scheduled)
        token_slots = None
        if self._by_slot:
            token_slots = self._slots_of_tokens(token_adapters, dict(zip(wanted, slots, strict=True)), num_tokens)
            if self._only_by_slot:
                return LoRAMapping(None, (), token_slots)
        if len(wanted) == 1 and len(token_adapters) == num_tokens and bool((token_adapters == wanted[0]).all()):
            return LoRAMapping(None, ((slots[0], 0, num_tokens),), token_slots)
        token_indices = [np.flatnonzero(token_adapters == i).astype(np.int64) for i in wanted]
        stops = np.cumsum([len(indices) for indices in token_indices]).tolist()
        segments = tuple(zip(slots, [0, *stops], stops, strict=False))
        return LoRAMapping(self._runtime.from_numpy(np.concatenate(token_indices)), segments, token_slots)

    def largest_batch(self, num_tokens: int) -> LoRAMapping:
        """The mapping that takes most memory: every token has an adapter, and all are gathered."""
        token_slots = self._runtime.from_numpy(np.zeros(num_tokens, dtype=np.int32)) if self._by_slot else None
        tokens = self._runtime.from_numpy(np.arange(num_tokens, dtype=np.int64))
        return LoRAMapping(tokens, ((0, 0, num_tokens),), token_slots)

    def _slots_of_tokens(self, adapters: np.ndarray, slots: dict[int, int], num_tokens: int) -> torch.Tensor:
        """[num_tokens], int32, device: the slot of each token's adapter; -1 for none, and for padding."""
        found = np.full(num_tokens, -1, dtype=np.int32)
        for adapter, slot in slots.items():
            found[: len(adapters)][adapters == adapter] = slot
        return self._runtime.from_numpy(found)

    def _claim_slots(self, wanted: list[int]) -> list[int]:
        for i in wanted:
            slot = self._slots.pop(i, None)
            if slot is None:
                slot = self._free_slot(wanted)
                for layer in self._layers:
                    layer.set_lora(slot, self._loaded[i])
                self.num_copied += 1
            self._slots[i] = slot  # now the most recently used
        return [self._slots[i] for i in wanted]

    def _free_slot(self, wanted: list[int]) -> int:
        free = set(range(self._config.max_loras)) - set(self._slots.values())
        if free:
            return min(free)
        oldest = next(i for i in self._slots if i not in wanted)
        return self._slots.pop(oldest)

"""The LoRA adapters of one worker: those that are loaded, on the host, and those that are in a slot, on the device.

    host (LoRARequest's id)   1  2  3  5  8        as many as the engine core says: it counts them
    slots                     [ 2 | 8 | 5 ]        max_loras; what a step needs is put in before it runs

The core loads an adapter (`add`) before it plans a step with it, on all workers, and plans no more than `max_loras`
different ones for requests that run. So nothing that is read here can fail within a step, and a slot is always found.
"""

from __future__ import annotations

import numpy as np

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
    """Makes the linear layers of a loaded model take adapters, and keeps these.

    Args:
        model: The model.
        ctx: Its build context.
        config: How many adapters, and how large.
        runtime: The device.

    Attributes:
        step: Tells the layers what to add.
    """

    def __init__(self, model: CausalLM, ctx: BuildContext, config: LoRAConfig, runtime: DeviceRuntime) -> None:
        self.step = CurrentLoRAMapping()
        self._model = model
        self._dtype = ctx.dtype
        self._config = config
        self._runtime = runtime
        self._layers = [
            StackedLoRAWeights(module, ctx, self.step, config.max_loras, config.max_lora_rank)
            for module in model.modules()
            if isinstance(module, Linear) and module.supports_lora
        ]
        self._shapes = {name: shape for layer in self._layers for name, shape in layer.shapes.items()}
        self._loaded: dict[int, dict[str, LoRALayerWeights]] = {}
        self._slots: dict[int, int] = {}  # adapter -> slot, least recently used first

    def add_adapter(self, request: LoRARequest) -> None:
        """Reads an adapter. One that is loaded already stays.

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
        """Forgets an adapter, if it is loaded."""
        self._loaded.pop(lora_int_id, None)
        self._slots.pop(lora_int_id, None)

    def prepare_batch(self, ids: np.ndarray, num_scheduled: np.ndarray, num_tokens: int) -> LoRAMapping | None:
        """Which tokens of a step have which adapter, all of which are in slots now; None where none has one.

        Args:
            ids: [R]: the adapter of each request, in batch order; 0 for none. One that could not be loaded counts as
                none: the core has failed its requests.
            num_scheduled: [R]: tokens of each.
            num_tokens: Of the step, padding included.
        """
        wanted = [int(i) for i in np.unique(ids) if int(i) in self._loaded]
        if not wanted:
            return None
        slots = self._claim_slots(wanted)
        of_token = np.repeat(ids, num_scheduled)
        if len(wanted) == 1 and len(of_token) == num_tokens and bool((of_token == wanted[0]).all()):
            return LoRAMapping(None, ((slots[0], 0, num_tokens),))
        places = [np.flatnonzero(of_token == i).astype(np.int64) for i in wanted]
        ends = np.cumsum([len(place) for place in places]).tolist()
        segments = tuple(zip(slots, [0, *ends], ends, strict=False))
        return LoRAMapping(self._runtime.from_numpy(np.concatenate(places)), segments)

    def largest_batch(self, num_tokens: int) -> LoRAMapping:
        """A batch that takes as much memory as any: every token has an adapter, and all are gathered."""
        return LoRAMapping(self._runtime.from_numpy(np.arange(num_tokens, dtype=np.int64)), ((0, 0, num_tokens),))

    def _claim_slots(self, wanted: list[int]) -> list[int]:
        for i in wanted:
            slot = self._slots.pop(i, None)
            if slot is None:
                slot = self._free_slot(wanted)
                for layer in self._layers:
                    layer.set_lora(slot, self._loaded[i])
            self._slots[i] = slot  # the newest
        return [self._slots[i] for i in wanted]

    def _free_slot(self, wanted: list[int]) -> int:
        free = set(range(self._config.max_loras)) - set(self._slots.values())
        if free:
            return min(free)
        oldest = next(i for i in self._slots if i not in wanted)
        return self._slots.pop(oldest)

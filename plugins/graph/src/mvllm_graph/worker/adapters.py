"""LoRA slots of models that run as graphs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from mvllm.extension_api.worker import LoRAMapping, LoRAModelManager
from mvllm.plugin_api import GraphProgram
from mvllm_graph.arrays import to_numpy


class AdapterArrays:
    """The LoRA slots of a model, as weights of its program that are set again when an adapter moves to a slot.

    Args:
        program: The program.
        arrays: The slots by name. They stay in host memory.
        lora: The adapters in them.

    Attributes:
        arrays: As given.
    """

    def __init__(self, program: GraphProgram, arrays: Mapping[str, torch.Tensor], lora: LoRAModelManager) -> None:
        self._program, self.arrays, self._lora = program, arrays, lora
        self._kept: dict[str, np.ndarray] = {}
        self._num_copied = -1
        self.update()

    def update(self) -> None:
        """Gives the contents of the slots to the program, unless it has them."""
        if self._num_copied == self._lora.num_copied:
            return
        self._num_copied = self._lora.num_copied
        for name, tensor in self.arrays.items():
            array = to_numpy(tensor)
            if self._program.keeps_arrays:  # which must not change afterwards
                array = self._kept[name] = array.copy()
            self._program.set_weight(name, array)


def adapter_slots(lora: LoRAMapping | None, num_tokens: int) -> np.ndarray:
    """[T]: the slot of each token's adapter, -1 for none."""
    if lora is None or lora.slots is None:
        return np.full(num_tokens, -1, dtype=np.int32)
    found: np.ndarray = lora.slots.numpy()
    return found

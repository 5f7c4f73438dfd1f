"""LoRA slots of models that run as graphs."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import torch

from mvllm.extension_api.worker import LoRAMapping
from mvllm.plugin_api import GraphProgram
from mvllm_graph.arrays import to_numpy


class AdapterArrays:
    """The LoRA slots of a model, as weights of its program that are set again when an adapter moves to a slot.

    Args:
        program: The program.
        arrays: The slots by name. They stay in host memory.

    Attributes:
        arrays: As given.
    """

    def __init__(self, program: GraphProgram, arrays: Mapping[str, torch.Tensor]) -> None:
        self._program, self.arrays = program, arrays
        self._kept: dict[str, np.ndarray] = {}
        self.give(arrays)

    def give(self, names: Collection[str]) -> None:
        """Gives the present contents of slots to the program."""
        for name in names:
            if name in self.arrays:
                array = to_numpy(self.arrays[name])
                if self._program.keeps_arrays:  # which must not change afterwards
                    array = self._kept[name] = array.copy()
                self._program.set_weight(name, array)


def adapter_slots(lora: LoRAMapping | None, num_tokens: int) -> np.ndarray:
    """[T]: the slot of each token's adapter, -1 for none."""
    if lora is None or lora.slots is None:
        return np.full(num_tokens, -1, dtype=np.int32)
    found: np.ndarray = lora.slots.numpy()
    return found

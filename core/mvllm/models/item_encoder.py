"""ItemEncoder: the part of a multimodal model that turns the features of items into embeddings.

    features of one image  ->  vision tower  ->  projector  ->  [rows, embedding_width]  ->  cached, merged into prompts

Every tensor-parallel rank holds the whole encoder and computes the same result, so no rank waits for another. It is on
the first pipeline stage only. Adapters (LoRA) do not apply to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from mvllm.platform.graphs import CompileBackend

Features = Mapping[str, torch.Tensor]
"""The processor's arrays of one item, on the device. Floats have the compute dtype."""


class FixedShapeTower(nn.Module, ABC):
    """A tower over items of one shape, which a platform may compile for each number of items."""

    def __init__(self) -> None:
        super().__init__()
        self._compiled: Callable[[torch.Tensor], torch.Tensor] | None = None

    @abstractmethod
    def compute(self, patches: torch.Tensor) -> torch.Tensor:
        """The states of all patches [n * rows, size], of items [n, patches, elements], compute dtype.

        It depends on weights and this tensor only.
        """

    def run(self, patches: torch.Tensor) -> torch.Tensor:
        """The result of `compute`, compiled where that is done."""
        return self.compute(patches) if self._compiled is None else self._compiled(patches)

    def compile_tower(self, compiler: CompileBackend | None) -> None:
        """As ItemEncoder.compile_towers."""
        self._compiled = None if compiler is None else compiler.compile_encoder(self.compute)


class ItemEncoder(nn.Module, ABC):
    """The encoders of one model. Its modules list their checkpoint tensors (`weight_targets`), as those of CausalLM."""

    def largest_item(self, num_rows: int) -> tuple[str, Features] | None:
        """The modality and features of an item of about `num_rows` rows, on the device; their values do not matter.

        Encoding it once measures the memory that an encoder takes, where the device's memory is not the host's. None,
        the default, measures nothing.
        """
        return None

    @abstractmethod
    def encode(self, modality: str, items: Sequence[Features]) -> list[torch.Tensor]:
        """The embeddings of items of one modality, computed together where their shapes permit.

        The result of an item does not depend on the other items, up to rounding.

        Args:
            modality: `image`, `video` or `audio`.
            items: Their features.

        Returns:
            For each item [rows, embedding_width], compute dtype.
        """

    def compile_towers(self, compiler: CompileBackend | None) -> None:
        """Compiles the towers whose items have one shape, where the platform does that. None drops what is compiled,
        which refers to weights."""
        for module in self.modules():
            if isinstance(module, FixedShapeTower):
                module.compile_tower(compiler)

    def ignores(self, name: str) -> bool:
        """Whether a tensor of the encoders' modules in the checkpoint is not used, as layers behind the last one that
        is read."""
        return False

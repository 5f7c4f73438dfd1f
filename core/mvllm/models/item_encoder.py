"""ItemEncoder: the part of a multimodal model that turns the features of items into embeddings.

    features of one image  ->  vision tower  ->  projector  ->  [rows, embedding_width]  ->  cached, merged into prompts

Every tensor-parallel rank holds the whole encoder and computes the same result, so no rank waits for another. It is on
the first pipeline stage only. Adapters (LoRA) do not apply to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import nn

Features = Mapping[str, torch.Tensor]
"""The processor's arrays of one item, on the device. Floats have the compute dtype."""


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

"""Gemma 3 with images: a SigLIP tower whose patches are averaged in squares, normalised and projected.

The positions of an image attend to each other in both directions, in every layer of the language model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from mvllm.config.hf_config import HFConfig
from mvllm.config.model import ModelConfig
from mvllm.errors import ModelError
from mvllm.layers.context import BuildContext
from mvllm.layers.linear import Linear
from mvllm.layers.matrix_layout import Part
from mvllm.layers.norm import GemmaRMSNorm
from mvllm.layers.weight_target import WeightTarget
from mvllm.models.item_encoder import Features, ItemEncoder
from mvllm.models.multimodal_model import MultiModalCausalLM
from mvllm.models.vision.clip import ClipTower

_PROJECTOR = "multi_modal_projector"


class Gemma3(MultiModalCausalLM):
    """`Gemma3ForConditionalGeneration` of Hugging Face checkpoints, before the class of its language model."""

    def build_item_encoder(self, ctx: BuildContext) -> ItemEncoder:
        return Gemma3Encoder(ctx, self.config, self.part_config("vision_config"))


class Gemma3Encoder(ItemEncoder):
    """Tower, average over squares of patches, norm and projection.

    Args:
        ctx: Build context of a tower.
        config: Of the model.
        vision: The object `vision_config`.

    Raises:
        ModelError: The number of embeddings is no square, or more than the patches.
    """

    def __init__(self, ctx: BuildContext, config: ModelConfig, vision: HFConfig) -> None:
        super().__init__()
        tower = HFConfig({"model_type": "siglip_vision_model", **vision.as_dict()}, vision.source)
        self.tower = ClipTower(ctx, "vision_tower", tower, None)
        count = config.hf_config.positive_int("mm_tokens_per_image", 256)
        side = math.isqrt(count)
        if side * side != count or side > self.tower.grid:
            raise ModelError(
                f"{config.hf_config.source}: 'mm_tokens_per_image' should be the square of at most "
                f"{self.tower.grid}, the patches along a side of an image, found {count}."
            )
        self._kernel = self.tower.grid // side
        size = self.tower.size
        eps = vision.positive_number("layer_norm_eps", 1e-6)
        self.norm = GemmaRMSNorm(ctx, f"{_PROJECTOR}.mm_soft_emb_norm", size, eps)
        self.projection = _Projection(ctx, f"{_PROJECTOR}.mm_input_projection", size, config.hidden_size)

    def encode(self, modality: str, items: Sequence[Features]) -> list[torch.Tensor]:
        pixels = torch.cat([item["pixel_values"].flatten(0, -4) for item in items])
        grid = self.tower.grid
        picture = self.tower(pixels).transpose(1, 2).unflatten(2, (grid, grid))
        pooled = F.avg_pool2d(picture, self._kernel).flatten(2).transpose(1, 2)
        projected = self.projection(self.norm(pooled.flatten(0, 1)))
        return list(projected.split([pooled.shape[1] * len(item["pixel_values"].flatten(0, -4)) for item in items]))

    def ignores(self, name: str) -> bool:
        return self.tower.ignores(name)


class _Projection(Linear):
    """A matrix that the checkpoint stores as [in, out], as the tensor `NAME_weight`."""

    def __init__(self, ctx: BuildContext, name: str, in_features: int, out_features: int) -> None:
        rows = slice(0, out_features)
        super().__init__(ctx, [Part(name, out_features, rows, rows)], in_features, bias=False, transposed=True)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        for name, target in super().weight_targets():
            yield f"{name.removesuffix('.weight')}_weight", target

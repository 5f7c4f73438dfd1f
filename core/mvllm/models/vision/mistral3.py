"""Mistral 3: Pixtral's tower, and a projector that merges squares of patches into one embedding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mvllm.config.hf_config import HFConfig
from mvllm.config.model import ModelConfig
from mvllm.errors import ModelError
from mvllm.layers.context import BuildContext
from mvllm.layers.linear import ReplicatedLinear
from mvllm.layers.norm import RMSNorm
from mvllm.models.item_encoder import Features, ItemEncoder
from mvllm.models.multimodal_model import MultiModalCausalLM
from mvllm.models.vision.feature_layers import FeatureLayers
from mvllm.models.vision.pixtral import PixtralTower, image_sizes
from mvllm.models.vision.projector import TwoLayerProjector


class Mistral3(MultiModalCausalLM):
    """`Mistral3ForConditionalGeneration` of Hugging Face checkpoints, before the class of its language model."""

    def build_item_encoder(self, ctx: BuildContext) -> ItemEncoder:
        return Mistral3Encoder(ctx, self.config, self.part_config("vision_config"))


class Mistral3Encoder(ItemEncoder):
    """Tower, norm, merger of patches, and projector.

    Args:
        ctx: Build context of a tower.
        config: Of the model.
        vision: The object `vision_config`.

    Raises:
        ModelError: Features of several layers are to be merged, whose sizes do not fit the projector.
    """

    def __init__(self, ctx: BuildContext, config: ModelConfig, vision: HFConfig) -> None:
        super().__init__()
        hf, name = config.hf_config, "multi_modal_projector"
        features = FeatureLayers.from_config(hf, layer=-1, strategy="full")
        if len(features.layers) > 1:
            raise ModelError(
                f"{hf.source}: 'vision_feature_layer' should be one layer, found {list(features.layers)}: the norm of "
                "the projector is as wide as one."
            )
        self.tower = PixtralTower(ctx, "vision_tower", vision, features)
        self._merge = hf.positive_int("spatial_merge_size", 2)
        size = self.tower.hidden_size
        self.norm = RMSNorm(ctx, f"{name}.norm", size, hf.positive_number("rms_norm_eps", 1e-6))
        merger = f"{name}.patch_merger.merging_layer"
        self.merger = ReplicatedLinear(ctx, merger, size * self._merge**2, size, bias=False)
        act, bias = hf.get("projector_hidden_act", "gelu"), bool(hf.get("multimodal_projector_bias", False))
        self.projector = TwoLayerProjector(ctx, name, size, config.hidden_size, act, bias=bias)

    def encode(self, modality: str, items: Sequence[Features]) -> list[torch.Tensor]:
        states, grids = self.tower.encode_images(image_sizes(items))
        parts = self.norm(states).split([rows * columns for rows, columns in grids])
        merged = [self._squares(part, *grid) for part, grid in zip(parts, grids, strict=True)]
        projected = self.projector(self.merger(torch.cat(merged)))
        return list(projected.split([len(each) for each in merged]))

    def _squares(self, states: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """[rows * columns, size] to [squares, size * patches of a square]: each element of all patches together."""
        n = self._merge
        grid = states.view(rows, columns, -1)[: rows // n * n, : columns // n * n]
        squares = grid.unflatten(1, (-1, n)).unflatten(0, (-1, n))
        return squares.permute(0, 2, 4, 1, 3).flatten(2).flatten(0, 1)

    def ignores(self, name: str) -> bool:
        return self.tower.ignores(name)

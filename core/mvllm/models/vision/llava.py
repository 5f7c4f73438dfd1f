"""LLaVA: a CLIP, SigLIP or Pixtral tower, two linear layers, and a language model.

Images of CLIP and SigLIP have one size and as many embeddings as patches. Those of Pixtral keep their proportions; the
rows of patches end with a token of their own, which is text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mvllm.config.hf_config import HFConfig
from mvllm.config.model import ModelConfig
from mvllm.layers.context import BuildContext
from mvllm.models.item_encoder import Features, ItemEncoder
from mvllm.models.multimodal_model import MultiModalCausalLM
from mvllm.models.vision.clip import ClipTower
from mvllm.models.vision.feature_layers import FeatureLayers
from mvllm.models.vision.pixtral import PIXTRAL_TYPE, PixtralTower, image_sizes
from mvllm.models.vision.projector import TwoLayerProjector


class Llava(MultiModalCausalLM):
    """`LlavaForConditionalGeneration` of Hugging Face checkpoints, before the class of its language model."""

    def build_item_encoder(self, ctx: BuildContext) -> ItemEncoder:
        return LlavaEncoder(ctx, self.config, self.part_config("vision_config"))


class LlavaEncoder(ItemEncoder):
    """Tower and projector.

    Args:
        ctx: Build context of a tower.
        config: Of the model.
        vision: The object `vision_config`.
    """

    def __init__(self, ctx: BuildContext, config: ModelConfig, vision: HFConfig) -> None:
        super().__init__()
        hf = config.hf_config
        features = FeatureLayers.from_config(hf, layer=-2, strategy="default")
        self.tower: ClipTower | PixtralTower
        if vision.get("model_type") == PIXTRAL_TYPE:
            self.tower = PixtralTower(ctx, "vision_tower", vision, features)
        else:
            self.tower = ClipTower(ctx, "vision_tower", vision, features)
        self.projector = TwoLayerProjector.read(ctx, self.tower.size, config)

    def encode(self, modality: str, items: Sequence[Features]) -> list[torch.Tensor]:
        if isinstance(self.tower, PixtralTower):
            states, grids = self.tower.encode_images(image_sizes(items))
            return list(self.projector(states).split([rows * columns for rows, columns in grids]))
        pixels = [item["pixel_values"].flatten(0, -4) for item in items]
        states = self.projector(self.tower(torch.cat(pixels)).flatten(0, 1))
        length = states.shape[0] // sum(len(each) for each in pixels)
        return list(states.split([length * len(each) for each in pixels]))

    def ignores(self, name: str) -> bool:
        return self.tower.ignores(name)

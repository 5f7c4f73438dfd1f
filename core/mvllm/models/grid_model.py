"""GridModel: multimodal models whose images are grids of patches (Qwen-VL, GLM-4V), before a language model's class."""

from __future__ import annotations

from typing import ClassVar, Protocol

from mvllm.config.hf_config import HFConfig
from mvllm.layers.context import BuildContext
from mvllm.models.item_encoder import ItemEncoder
from mvllm.models.multimodal_model import MultiModalCausalLM
from mvllm.models.vision.grid_tower import GridTower


class TowerType(Protocol):
    """A class of vision towers."""

    def __call__(self, ctx: BuildContext, vision: HFConfig, out_size: int) -> GridTower:
        """A tower.

        Args:
            ctx: Build context of a tower.
            vision: `vision_config`.
            out_size: The language model's `hidden_size`.
        """


class GridModel(MultiModalCausalLM):
    """A base that stands before a language model's class.

    Attributes:
        tower: Class of the vision tower.
    """

    encoder_modules = ("visual",)
    tower: ClassVar[TowerType]

    def build_item_encoder(self, ctx: BuildContext) -> ItemEncoder:
        """The vision tower."""
        return self.tower(ctx, self.part_config("vision_config"), self.config.hidden_size)

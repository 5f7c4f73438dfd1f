"""GridModel: multimodal models whose images are grids of patches (Qwen-VL, GLM-4V), before a language model's class."""

from __future__ import annotations

from typing import ClassVar

from mvllm.layers.context import BuildContext
from mvllm.models.item_encoder import ItemEncoder
from mvllm.models.multimodal_model import MultiModalCausalLM
from mvllm.models.vision.grid_tower import GridTower


class GridModel(MultiModalCausalLM):
    """A base that stands before a language model's class.

    Attributes:
        tower: Class of the vision tower.
    """

    encoder_modules = ("visual",)
    encoder_names: ClassVar[dict[str, str]] = {}
    tower: ClassVar[type[GridTower]]

    def build_item_encoder(self, ctx: BuildContext) -> ItemEncoder:
        """The vision tower."""
        return self.tower(ctx, self.part_config("vision_config"), self.config.hidden_size)
